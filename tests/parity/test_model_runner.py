"""What the runner makes of a model and its options, and what the probe at start catches."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import attention, model_runner
from engine.batch import build
from engine.config import EngineConfig
from engine.decision import ScheduledSequence
from engine.errors import ConfigError, ModelUnsupported, OutOfMemory
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.sampler import sample
from engine.sequence import Sequence
from engine.staging import Staging
from tests.support.tiny_models import SUPPORTED, VOCAB_SIZE, WINDOW, save


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

    assert run(model_dir, dtype="auto", kernels="reference").dtype == expected


def test_auto_is_bfloat16_where_layers_are_fused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})

    assert run(model_dir, dtype="auto").dtype == torch.bfloat16


def test_bfloat16_passes_the_probe(model_dir: Path) -> None:
    assert run(model_dir, dtype="bfloat16").kv_bytes_per_token == 2 * 3 * 2 * 16 * 2


def test_what_scheduling_is_asked_for_reaches_the_scheduler(model_dir: Path) -> None:
    asked = {
        "chunked_prefill": False,
        "prefill_first": True,
        "scheduling": "iteration_level",
        "reservation": "pow2",
        "prefix_caching": False,
        "preemption": "swap",
        "aging": 7,
        "run_ahead": True,
    }

    config = run(model_dir, **asked, swap_blocks=5).scheduler_config

    assert {name: getattr(config, name) for name in asked} == asked
    assert config.num_host_blocks == 5


def test_scored_tokens_are_as_many_as_memory_was_set_aside_for(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(model_dir)._memory.activation_bytes

    monkeypatch.setattr(model_runner, "_MAX_SCORED_TOKENS", 612)
    after = run(model_dir)

    assert after.scheduler_config.max_scored_tokens == 612
    assert after._memory.activation_bytes - before == 100 * VOCAB_SIZE * 16


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("llama", {}, None),
        ("mistral", {}, WINDOW),
        ("phi3", {}, WINDOW),
        ("mistral", {"sliding_window": 256}, None),
        ("gemma3_text", {}, None),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 4}, WINDOW),
        ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}, None),
        ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0}, WINDOW),
    ],
)
def test_a_model_slides_where_every_layer_does(
    family: str, settings: dict[str, Any], expected: int | None, tmp_path: Path
) -> None:
    runner = run(save(family, SUPPORTED[family] | settings, tmp_path))

    assert runner.geometry.sliding_window == expected
    assert runner.scheduler_config.sliding_window == expected


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_one_byte_halves_what_bfloat16_takes_but_for_the_scales(kv_dtype: str, model_dir: Path) -> None:
    assert run(model_dir, kv_dtype=kv_dtype).kv_bytes_per_token == 2 * 3 * 2 * (16 + 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_blocks": -1}, r"swap_blocks: -1 is outside 0\.\."),
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


def test_host_blocks_beyond_the_machine_are_refused_with_the_table(model_dir: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"swap_blocks: 2000000000 blocks of .* has room for \d+; lower it"):
        run(model_dir, swap_blocks=2_000_000_000)


def test_longrope_is_served_up_to_the_length_it_was_first_trained_on(tmp_path: Path) -> None:
    directory = save("phi3+longrope", SUPPORTED["phi3+longrope"], tmp_path)

    assert run(directory).scheduler_config.max_model_len == 128
    with pytest.raises(ConfigError, match="max_model_len: 129 is over the 128 positions"):
        run(directory, max_model_len=129)


def test_the_memory_table_names_blocks_and_tokens(runner: ModelRunner) -> None:
    assert "40 blocks of 16 = 640 tokens" in [row.note for row in runner.memory_rows()]


def test_a_step_that_samples_nothing_has_no_logits(runner: ModelRunner) -> None:
    sequence = Sequence(Request(request_id="", prompt_token_ids=(5, 6, 7)), (0, 0, 0), frozenset())
    sequence.block_table, sequence.num_computed_tokens = [1], 2

    logits = runner.forward(build([ScheduledSequence(sequence, 2)], 16, Staging(runner.device)))

    assert logits.shape == (0, VOCAB_SIZE)
    assert logits.dtype == torch.float32


def sequence_of(token_ids: list[int], block_table: list[int], num_computed: int = 0) -> Sequence:
    sequence = Sequence(Request(request_id="", prompt_token_ids=tuple(token_ids)), (0, 0, 0), frozenset())
    sequence.block_table, sequence.num_computed_tokens = block_table, num_computed
    return sequence


def last_logits(runner: ModelRunner, *sequences: Sequence) -> torch.Tensor:
    """Of each sequence whose gap is closed in one step."""
    items = [ScheduledSequence(sequence, sequence.gap, 1) for sequence in sequences]
    for sequence in sequences:
        sequence.num_computed_tokens = sequence.num_tokens
    return runner.forward(build(items, 16, Staging(runner.device)))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_sequence_whose_blocks_were_swapped_and_copied_goes_on_as_if_nothing_had_happened(
    kv_dtype: str, model_dir: Path
) -> None:
    runner = run(model_dir, kv_dtype=kv_dtype, swap_blocks=4)
    token_ids = [3 + position % 90 for position in range(41)]
    last_logits(runner, sequence_of(token_ids[:40], [1, 2, 3]))
    undisturbed = last_logits(runner, sequence_of(token_ids, [1, 2, 3], 40))

    runner.move([(1, 3), (2, 0)], [(3, 1)], [])
    runner._kv_cache.blocks[2:].fill_(-1)
    runner.move([], [], [(3, 30), (0, 40)])

    assert torch.equal(last_logits(runner, sequence_of(token_ids, [30, 40, 1], 40)), undisturbed)
    assert 0 < runner.swap_s_per_block < 1


def test_without_host_blocks_no_block_is_ever_worth_swapping(runner: ModelRunner) -> None:
    assert runner.swap_s_per_block == math.inf


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_sequence_reads_blocks_that_another_fills_in_the_same_step(kv_dtype: str, is_first: bool, model_dir: Path) -> None:
    runner = run(model_dir, kv_dtype=kv_dtype)
    token_ids = [3 + position * 7 % 90 for position in range(45)]
    alone = last_logits(runner, sequence_of([*token_ids[:32], 5, 6, 7], [4, 5, 6]))
    runner._kv_cache.blocks.fill_(-1)

    filling, reading = sequence_of(token_ids, [9, 7, 8]), sequence_of([*token_ids[:32], 5, 6, 7], [9, 7, 3], 32)
    both = last_logits(runner, *((reading, filling) if is_first else (filling, reading)))

    assert (both[0 if is_first else 1] - alone[0]).abs().max() < 1e-4


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.02), ("fp8", 0.15)])
def test_the_logits_of_a_cache_in_one_byte_are_close(kv_dtype: str, most: float, model_dir: Path, runner: ModelRunner) -> None:
    token_ids = [3 + position * 7 % 90 for position in range(45)]

    ours = last_logits(run(model_dir, kv_dtype=kv_dtype), sequence_of(token_ids, [1, 2, 3]))

    exact = last_logits(runner, sequence_of(token_ids, [1, 2, 3]))
    assert 0 < (ours - exact).norm() / exact.norm() < most


@pytest.mark.parametrize(("asked", "expected"), [(None, False), (True, True), (False, False)])
def test_a_cpu_runs_ahead_when_asked(asked: bool | None, expected: bool, model_dir: Path) -> None:
    assert run(model_dir, run_ahead=asked).scheduler_config.run_ahead is expected


def test_the_longest_decode_runs_in_one_block(runner: ModelRunner) -> None:
    batch = model_runner._longest_decode(5, 100, runner.device)
    cache = KVCache(runner.geometry, 1, 16, runner.dtype, runner.device)

    assert attention.forward(runner._model, batch, cache, runner._kernels).shape == (5, VOCAB_SIZE)
    assert (batch.is_decode, batch.host.max_context_len) == (True, 100)


def test_the_largest_step_runs_in_one_block(runner: ModelRunner) -> None:
    batch, sampling = model_runner._largest_step(8, 300, 20, runner.device)
    cache = KVCache(runner.geometry, 1, 16, runner.dtype, runner.device)

    logits = attention.forward(runner._model, batch, cache, runner._kernels)

    assert batch.input_ids.shape == (296,)
    assert len(sample(logits[20:], sampling).token_ids) == 8


def test_the_probe_leaves_our_attention_in_place(spoilt: ModelRunner) -> None:
    probe(spoilt)

    assert spoilt._model.config._attn_implementation == attention.ATTENTION_NAME


@pytest.fixture
def spoilt(model_dir: Path) -> ModelRunner:
    """A runner on the model's own layers, which the test may change."""
    return run(model_dir, kernels="reference")


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


def test_the_probe_catches_a_window_that_is_not_the_configurations(tmp_path: Path) -> None:
    settings = {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}  # too wide to show in the logits
    runner = run(save("qwen2", SUPPORTED["qwen2"] | settings, tmp_path), kernels="reference")
    runner._model.model.layers[2].self_attn.sliding_window = 90

    with pytest.raises(ModelUnsupported, match=r"layer 2 passes a sliding window of 90 .* where its configuration says 100"):
        probe(runner)


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
