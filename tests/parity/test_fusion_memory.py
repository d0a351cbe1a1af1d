"""Fused layers whose kernels pack nothing, as on a GPU: one copy of the weights, and the logits of the unfused model."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import fusion, model, model_runner
from engine.model_runner import ModelRunner
from engine.shard import weights_bytes
from kernels import dispatch
from tests.support.parity import load, logits_of
from tests.support.tiny_models import SUPPORTED, save

PROMPT = (5, 9, 3, 77, 20, 41)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Plain layers, biases, norms of single heads."""
    save(request.param, SUPPORTED[request.param], tmp_path)
    return tmp_path


@pytest.fixture
def loaded(directory: Path) -> Any:
    return model.load(directory, torch.device("cpu"), torch.float32)


def test_weights_of_one_product_are_views_of_one_piece_of_memory(loaded: Any) -> None:
    before = {name: weight.clone() for name, weight in loaded.state_dict().items()}

    fusion.fuse(loaded, dispatch.REFERENCE_LAYERS, 256)

    for layer in loaded.get_decoder().layers:
        attend, mlp = layer.self_attn, layer.mlp
        for group in ((attend.q_proj, attend.k_proj, attend.v_proj), (mlp.gate_proj, mlp.up_proj)):
            for part in ("weight", "bias"):
                tensors = [getattr(linear, part) for linear in group if getattr(linear, part) is not None]
                assert all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(tensors))
                assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) <= 1
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.state_dict().items())


def test_a_fused_weight_is_counted_once(loaded: Any) -> None:
    before = weights_bytes(loaded)

    fusion.fuse(loaded, dispatch.REFERENCE_LAYERS, 256)

    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in loaded.parameters()}
    assert sum(storages.values()) == weights_bytes(loaded) == before


@pytest.fixture
def fused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(model_runner, "attention_kernels", lambda *_, **__: dispatch.REFERENCE)
    monkeypatch.setattr(model_runner, "layer_kernels", lambda *_, **__: dispatch.REFERENCE_LAYERS)
    return load(directory)


def test_its_logits_are_those_of_the_unfused_model(fused: ModelRunner, directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.support.parity import request, run

    expected = logits_of(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), PROMPT).log_softmax(-1)

    outcome = run(fused, [request(0, PROMPT, max_tokens=1, logprobs=5)]).outcomes["0", 0]

    for token_id, logprob in outcome.logprobs[0].top:
        assert logprob == pytest.approx(expected[-1, token_id].item(), abs=1e-5)
