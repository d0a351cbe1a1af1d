"""What the runner makes of a model and its options, and what the probe at start catches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import attention, model_runner
from engine.batch import flatten
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelUnsupported, OutOfMemory
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.sampler import sample
from engine.scheduler import ScheduledSequence
from engine.sequence import Sequence
from tests.support.tiny_models import SUPPORTED, VOCAB_SIZE, save


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", SUPPORTED["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return run(model_dir)


def run(directory: Path, **options: Any) -> ModelRunner:
    return ModelRunner(
        EngineConfig(model=str(directory), **({"kv_blocks": 40, "dtype": "float32", "num_threads": 1} | options))
    )


def probe(runner: ModelRunner) -> None:
    attention.probe(runner._model, runner.geometry, runner._kernels)


def test_defaults_on_a_cpu(runner: ModelRunner) -> None:
    config = runner.scheduler_config

    assert (config.max_slots, config.max_num_batched_tokens, config.block_size) == (64, 2048, 16)
    assert (config.num_blocks, config.max_model_len, config.max_sequence_tokens) == (40, 256, 256)


def test_a_step_has_room_for_a_token_of_each_slot(model_dir: Path) -> None:
    assert run(model_dir, max_slots=3000).scheduler_config.max_num_batched_tokens == 3000


def test_without_chunks_the_budget_takes_the_longest_prompt(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "_CPU_DEFAULTS", (4, 100))

    assert run(model_dir, chunked_prefill=False).scheduler_config.max_num_batched_tokens == 256


def test_a_watermark_of_one_percent(model_dir: Path) -> None:
    assert run(model_dir, kv_blocks=399).scheduler_config.watermark_blocks == 3


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"avx2": True}, torch.float32),
        ({"avx512_f": True, "avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_auto_is_bfloat16_where_the_processor_computes_in_it(
    features: dict[str, bool], expected: torch.dtype, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)

    assert run(model_dir, dtype="auto").dtype == expected


def test_bfloat16_passes_the_probe(model_dir: Path) -> None:
    assert run(model_dir, dtype="bfloat16").kv_bytes_per_token == 2 * 3 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype: int4 is unknown; use auto, float32"),
        ({"device": "tpu:0"}, "device: tpu:0 is unknown; use cpu or cuda:N"),
        ({"device": "meta"}, "device: meta is not supported"),
        ({"device": "cuda:99"}, "device: cuda:99 is not there"),
        ({"max_model_len": 257}, "max_model_len: 257 is over the 256 positions"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(model_dir, **options)


def test_an_explicit_length_the_cache_cannot_hold_is_refused_and_names_the_one_that_works(model_dir: Path) -> None:
    with pytest.raises(OutOfMemory, match="works is 160"):
        run(model_dir, kv_blocks=10, max_model_len=161)


def test_longrope_is_served_up_to_the_length_it_was_first_trained_on(tmp_path: Path) -> None:
    directory = save("phi3+longrope", SUPPORTED["phi3+longrope"], tmp_path)

    assert run(directory).scheduler_config.max_model_len == 128
    with pytest.raises(ConfigError, match="max_model_len: 129 is over the 128 positions"):
        run(directory, max_model_len=129)


def test_the_memory_table_names_blocks_and_tokens(runner: ModelRunner) -> None:
    assert "40 blocks of 16 = 640 tokens" in runner.memory_table()


def test_a_step_that_samples_nothing_has_no_logits(runner: ModelRunner) -> None:
    sequence = Sequence(Request(request_id="", prompt_token_ids=(5, 6, 7)), 0, frozenset())
    sequence.block_table = [1]

    logits = runner.forward(flatten([ScheduledSequence(sequence, 2, False)], 16, runner.device))

    assert logits.shape == (0, VOCAB_SIZE)
    assert logits.dtype == torch.float32


def test_the_largest_step_runs_in_one_block(runner: ModelRunner) -> None:
    batch = model_runner._largest_step(8, 300, runner.device)
    cache = KVCache(runner.geometry, 1, 16, runner.dtype, runner.device)

    logits = attention.forward(runner._model, batch, cache, runner._kernels)

    assert batch.input_ids.shape == (296,)
    assert len(sample(logits, batch.sampling).token_ids) == 8


def test_the_probe_leaves_our_attention_in_place(runner: ModelRunner) -> None:
    probe(runner)

    assert runner._model.config._attn_implementation == attention.ATTENTION_NAME


@pytest.fixture
def spoilt(model_dir: Path) -> ModelRunner:
    """A runner whose model the test may change."""
    return run(model_dir)


def test_the_probe_catches_a_model_that_ignores_positions(spoilt: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = spoilt._model.model.forward

    def ignores_positions(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    monkeypatch.setattr(spoilt._model.model, "forward", ignores_positions)

    with pytest.raises(ModelUnsupported, match="LlamaForCausalLM: its logits differ from its eager attention"):
        probe(spoilt)


def test_the_probe_catches_a_layer_that_attends_twice(spoilt: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = spoilt._model.model.layers[1].self_attn
    inner = layer.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        inner(*args, **kwargs)
        return inner(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", twice)

    with pytest.raises(ModelUnsupported, match="2 of its 3 layers call the attention function exactly once"):
        probe(spoilt)


def test_the_probe_catches_attention_that_stayed_eager(spoilt: ModelRunner) -> None:
    spoilt._model.set_attn_implementation("eager")

    with pytest.raises(ModelUnsupported, match="computes attention with its own code"):
        probe(spoilt)


def test_the_probe_catches_keys_of_another_shape(spoilt: ModelRunner) -> None:
    spoilt.geometry = replace(spoilt.geometry, num_kv_heads=1)

    with pytest.raises(ModelUnsupported, match=r"layer 0 has keys of 2x16 .* where 1x16 is cached"):
        probe(spoilt)


def test_the_probe_catches_weights_that_are_not_numbers(spoilt: ModelRunner) -> None:
    spoilt._model.model.norm.weight.data.fill_(torch.nan)

    with pytest.raises(ModelUnsupported, match="differ from its eager attention by nan"):
        probe(spoilt)


def test_the_probe_turns_an_error_inside_the_model_into_a_reason(spoilt: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("no such keyword")

    monkeypatch.setattr(spoilt._model.model, "forward", broken)

    with pytest.raises(ModelUnsupported, match="a small batch fails in it: TypeError"):
        probe(spoilt)
