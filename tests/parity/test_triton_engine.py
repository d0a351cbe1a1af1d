"""A whole engine on the Triton kernels, under their interpreter: attention, layers, sampling and moves of blocks at once."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from engine import fusion, host_pool, kv_cache, model_runner, sampler
from engine.model_runner import ModelRunner
from kernels import dispatch
from tests.support.greedy import generate_greedy
from tests.support.parity import load, request, run
from tests.support.tiny_models import SUPPORTED, save

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # numpy interprets
PROMPTS = [(5, 9, 3, 77, 20, 41, 8), (11, 60, 2, 4), (30, 31, 5, 6, 7, 8, 9, 10, 11, 12, 44)]
NUM_TOKENS = 4
CRAMPED: dict[str, Any] = {"max_num_batched_tokens": 8, "num_blocks": 4, "preemption": "swap", "num_host_blocks": 60}


@pytest.fixture(scope="module")
def tiny_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of two layers; those of qwen3 have norms of single heads."""
    found = {family: tmp_path_factory.mktemp(family) for family in ("llama", "qwen3")}
    for family, directory in found.items():
        save(family, SUPPORTED[family] | {"num_hidden_layers": 2}, directory)
    return found


def fused(directory: Path, layers: dispatch.LayerKernels, attention: dispatch.AttentionKernels, **options: Any) -> ModelRunner:
    """A runner on these kernels; the proof at start is left out, which takes longer than a test."""
    runner = load(directory, kernels="reference", **options)
    fusion.fuse(runner._model, layers, 256)
    runner._kernels = attention
    return runner


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelRunner]:
    """Makes a runner on what a GPU gets."""
    monkeypatch.setattr(sampler, "sampling_kernels", lambda _: dispatch._triton_sampling())
    monkeypatch.setattr(kv_cache, "HostPool", host_pool.StreamedHostPool)  # on streams that run everything at once
    for name in ("Stream", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda _: Mock())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Mock(elapsed_time=lambda _: 1.0))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    for module in (kv_cache, host_pool):
        monkeypatch.setattr(module, "block_kernels", lambda _: dispatch._triton_blocks())
    return lambda directory, **options: fused(directory, dispatch._triton_layers(), dispatch._triton_attention(), **options)


def test_greedy_tokens_of_chunked_and_swapped_sequences_equal_generate(
    on_triton: Callable[..., ModelRunner], tiny_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = on_triton(tiny_dirs["llama"])
    monkeypatch.setattr(model_runner, "CudaCapture", lambda device: lambda compute: compute)  # replays by computing again
    monkeypatch.setattr(model_runner, "decode_sizes", lambda max_slots: (3,))  # so that steps are padded
    monkeypatch.setattr(runner, "_free_bytes", lambda: 0)
    runner._capture(16, 256)
    jobs = [request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]

    done = run(runner, jobs, run_ahead=True, **CRAMPED)

    assert done.counts["num_swap_preemptions"] > 0
    expected = generate_greedy(tiny_dirs["llama"], PROMPTS, NUM_TOKENS)
    assert [list(done.tokens[str(i), 0]) for i in range(len(jobs))] == expected


def drawn(runner: ModelRunner) -> dict[tuple[str, int], tuple[int, ...]]:
    options: dict[str, Any] = {"temperature": 0.8, "max_tokens": 3}
    jobs = [request(0, PROMPTS[1], seed=1, n=2, **options), request(1, PROMPTS[0], seed=2, min_p=0.1, **options)]
    return run(runner, jobs).tokens


def test_drawn_forks_over_fp8_equal_those_of_the_twins(tiny_dirs: dict[str, Path], request: pytest.FixtureRequest) -> None:
    expected = drawn(fused(tiny_dirs["qwen3"], dispatch.REFERENCE_LAYERS, dispatch.REFERENCE, kv_dtype="fp8"))
    on_triton: Callable[..., ModelRunner] = request.getfixturevalue("on_triton")

    assert drawn(on_triton(tiny_dirs["qwen3"], kv_dtype="fp8")) == expected
