"""Models with fused layers compute what they compute without: logits, tokens, and the same bits in any batch."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine import fusion, model
from engine.batch import build
from engine.config import EngineConfig
from engine.core import Engine
from engine.decision import ScheduledSequence
from engine.errors import ConfigError, ModelUnsupported
from engine.model_runner import INT8_TOLERANCE, ModelRunner
from engine.request import Request
from engine.sequence import Sequence
from engine.staging import Staging
from tests.support import parity
from tests.support.greedy import generate_greedy
from tests.support.parity import Configured, Outcome, Run, request, run
from tests.support.tiny_models import SUPPORTED, VOCAB_SIZE, WINDOW, save

NUM_TOKENS = 16
# Sizes that the stack of layers takes in a block of 16, and sizes that parts of it leave to others.
_STACKED = SUPPORTED["llama"] | {"head_dim": 32, "intermediate_size": 128}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _STACKED),
    "llama with a tied head": ("llama", _STACKED | {"tie_word_embeddings": True}),
    "llama with biases": ("llama", _STACKED | {"attention_bias": True, "mlp_bias": True}),
    "llama with small heads": ("llama", SUPPORTED["llama"]),
    "llama with odd sizes": ("llama", _STACKED | {"hidden_size": 72, "intermediate_size": 90, "head_dim": 20}),
    "mistral": ("mistral", _STACKED | {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", _STACKED),
    "qwen2 with windows": ("qwen2", _STACKED | {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", _STACKED),
    "qwen3 with odd heads": ("qwen3", _STACKED | {"head_dim": 20}),
}
INT8_BOUND = 0.08
STEPS = ((20, 5, 0, 1), (1, 12, 7, 0), (17, 3, 1, 1), (1, 1, 1, 1), (1, 1, 0, 1), (1, 1, 0, 0))
BATCHES: dict[str, dict[str, Any]] = {
    "crowd": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_slots": 4},
    "no prefixes": {"prefix_caching": False, "max_num_batched_tokens": 37},
    "no chunks": {"scheduling": "iteration_level"},
    "recomputed": {"num_blocks": 7},
    "swapped": {"num_blocks": 7, "preemption": "swap", "num_host_blocks": parity.HOST_BLOCKS},
}


def prompts_of(lengths: list[int], seed: int = 0) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in lengths]


PROMPTS = prompts_of([60, 3, 41, 17, 16, 1, 33, 50])
PROMPTS.append(PROMPTS[0][:48] + PROMPTS[2][:5])  # found in the prefix cache, in part


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, settings = VARIANTS[request.param]
    return save(family, settings, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fused(variant: Path) -> ModelRunner:
    return load(variant)


@pytest.fixture(scope="module")
def greedy(variant: Path) -> list[list[int]]:
    return generate_greedy(variant, PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", _STACKED, tmp_path_factory.mktemp("llama"))


def load(directory: Path, **options: Any) -> ModelRunner:
    return parity.load(directory, **({"block_size": 16} | options))


def all_logits(runner: ModelRunner, block_size: int) -> Tensor:
    """Of every position of four sequences on shuffled blocks, computed in STEPS; unwritten places are NaN."""
    runner._kv_cache.blocks.fill_(-1)
    prompts = prompts_of([sum(counts) for counts in zip(*STEPS, strict=True)])
    blocks = random.Random(1).sample(range(1, 41), 40)
    sequences = [Sequence(Request(request_id="", prompt_token_ids=prompt), (0, 0, 0), frozenset()) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        sequence.block_table = [blocks.pop() for _ in range(-(-len(prompt) // block_size))]
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for counts in STEPS:
        items = [ScheduledSequence(s, count, 1) for s, count in zip(sequences, counts, strict=True) if count]
        for item in items:
            item.sequence.num_computed_tokens += item.num_tokens
        batch = replace(build(items, block_size, Staging(runner.device)), logits_indices=torch.arange(sum(counts)))
        for own, part in zip(rows, runner.forward(batch).split(counts), strict=True):
            own.append(part)
    return torch.cat([part for own in rows for part in own])


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def of_reference(directory: Path, **options: Any) -> Tensor:
    return all_logits(load(directory, kernels="reference", **options), options.get("block_size", 16))


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_fused_logits_equal_the_references(variant: Path, block_size: int) -> None:
    ours = all_logits(load(variant, block_size=block_size), block_size)

    assert difference(ours, of_reference(variant, block_size=block_size)) < 3e-6


def test_fused_logits_in_bfloat16_are_as_close_as_the_references(variant: Path) -> None:
    exact = of_reference(variant)

    ours = all_logits(load(variant, dtype="bfloat16"), 16)

    assert difference(ours, exact) <= difference(of_reference(variant, dtype="bfloat16"), exact)


@pytest.mark.parametrize("batch", BATCHES)
def test_greedy_tokens_equal_generate(batch: str, fused: ModelRunner, greedy: list[list[int]]) -> None:
    requests = [request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]

    done = run(fused, requests, **BATCHES[batch])

    assert [list(done.tokens[str(i), 0]) for i in range(len(PROMPTS))] == greedy
    assert done.counts["num_preemptions"] > 0 or "num_blocks" not in BATCHES[batch]


@pytest.mark.parametrize("options", [{"block_size": 8}, {"block_size": 32}, {"kv_dtype": "int8"}], ids=str)
def test_tokens_equal_the_references(options: dict[str, Any], llama: Path) -> None:
    requests = [request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]

    found = run(load(llama, **options), requests)

    assert found.tokens == run(load(llama, kernels="reference", **options), requests).tokens


def needle(**options: Any) -> Request:
    return request("needle", PROMPTS[0], **({"max_tokens": NUM_TOKENS, "logprobs": 5, "prompt_logprobs": 0} | options))


def in_batch(runner: ModelRunner, changes: dict[str, Any]) -> Outcome:
    """The needle behind others, so that it is the one that is preempted."""
    others = [request(i, prompt, max_tokens=12 + i) for i, prompt in enumerate(PROMPTS[1:])]
    done = run(runner, [*others[:4], needle(), *others[4:]], **changes)
    assert done.counts["num_preemptions"] > 0 or "num_blocks" not in changes
    return done.outcomes["needle", 0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in VARIANTS if "odd" not in name),
        *((name, {"dtype": "bfloat16"}) for name in ("llama", "mistral", "qwen3")),
        *((name, {"quantisation": "int8"}) for name in ("llama", "qwen2 with windows")),
    ],
    ids=str,
)
def test_a_request_has_the_bits_it_has_alone(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    runner = load(save(*VARIANTS[name], tmp_path), num_threads=2, **options)
    alone = run(runner, [needle()]).outcomes["needle", 0]

    for batch, changes in BATCHES.items():
        found = in_batch(runner, changes)
        assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs), batch
        assert found.prompt_logprobs == alone.prompt_logprobs, batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefix_from_the_cache_gives_the_bits_of_one_computed(dtype: str, llama: Path) -> None:
    runner = load(llama, dtype=dtype)
    alone = run(runner, [needle(prompt_logprobs=None)]).outcomes["needle", 0]
    done = Run(Engine(Configured(runner)), [request("before", PROMPTS[0], max_tokens=3)]).to_end()

    done.add(needle(prompt_logprobs=None))
    done.to_end()

    found = done.outcomes["needle", 0]
    assert found.num_cached_tokens == 48
    assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)


def test_int8_is_close_to_what_it_rounds(llama: Path) -> None:
    assert 1e-4 < difference(all_logits(load(llama, quantisation="int8"), 16), of_reference(llama)) < 0.1


SPOILING: dict[str, Callable[[Any], Any]] = {
    "a product": lambda model: model.model.layers[1].mlp.down_proj.weight.mul_(1.5),
    "a norm": lambda model: model.model.layers[2].post_attention_layernorm.weight.mul_(1.5),
    "the last norm": lambda model: model.model.norm.weight[:30].mul_(1.5),
    "the head": lambda model: model.lm_head.weight[:30].mul_(1.5),
    "a scale": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 1.0),
    "no number": lambda model: model.model.layers[0].mlp.up_proj.weight[3].fill_(torch.nan),
}


@pytest.mark.parametrize("spoil", SPOILING)
def test_layers_that_compute_something_else_are_refused(spoil: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuse = fusion.fuse

    def fuse_something_else(model: Any, *rest: Any) -> None:
        with torch.no_grad():
            SPOILING[spoil](model)
        fuse(model, *rest)

    monkeypatch.setattr(fusion, "fuse", fuse_something_else)

    with pytest.raises(
        ModelUnsupported, match=r"LlamaForCausalLM: with fused layers its logits differ by .*; use kernels: reference"
    ):
        load(llama)


def test_the_weights_of_layers_are_kept_once(llama: Path) -> None:
    model = load(llama)._model

    assert [name for name, parameter in model.named_parameters() if parameter.ndim > 1] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kernels": "reference"}, "kernels reference"),
        ({"batch_invariant": True}, "batch_invariant True"),
        ({"tensor_parallel": 2}, "tensor_parallel 2"),
        ({"device": "cuda:0"}, "device cuda:0"),
    ],
)
def test_int8_is_refused_where_layers_are_not_fused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^quantisation: int8 is for fused layers .*, not for {named}; leave one out$"):
        EngineConfig(model="m", quantisation="int8", **options)


def test_int8_is_refused_for_other_families(tmp_path: Path) -> None:
    directory = save("gpt2", SUPPORTED["gpt2"], tmp_path)

    with pytest.raises(ConfigError, match=r"^quantisation: int8 is for llama, .*, not for gpt2 in float32; leave it out$"):
        load(directory, quantisation="int8")


def test_int8_is_refused_in_float16(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"^quantisation: int8 is for .* in float32 or bfloat16, not for llama in float16"):
        load(llama, quantisation="int8", dtype="float16")


def test_other_models_keep_their_layers(tmp_path: Path) -> None:
    settings = SUPPORTED["llama"] | {"hidden_act": "gelu"}
    runner = load(save("llama", settings, tmp_path))

    assert runner._model.model.layers[0].mlp.up_proj.weight is not None
    assert runner._kernels.name == "cpu"


def test_int8_of_a_real_model_is_within_the_bound() -> None:
    """0.040 measured, on AVX2 (bench/accuracy.py has the perplexity of whole texts); the likeliest token stays."""
    directory = model.resolve("smollm2-135m-instruct")
    tokenizer = Tokenizer.from_file(str(model.tokenizer_dir(directory) / "tokenizer.json"))
    prompt = tuple(tokenizer.encode("The capital of France is Paris, and the capital of Italy is").ids)

    exact, rounded = (last_logits(load(directory, quantisation=words), prompt) for words in ("none", "int8"))

    assert difference(rounded, exact) < INT8_BOUND < INT8_TOLERANCE
    assert rounded.argmax() == exact.argmax()


def last_logits(runner: ModelRunner, prompt: tuple[int, ...]) -> Tensor:
    sequence = Sequence(Request(request_id="", prompt_token_ids=prompt), (0, 0, 0), frozenset())
    sequence.block_table, sequence.num_computed_tokens = [1, 2], len(prompt)
    return runner.forward(build([ScheduledSequence(sequence, len(prompt), 1)], 16, Staging(runner.device)))[0]
