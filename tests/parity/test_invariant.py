"""With `batch_invariant` a request's log probabilities have the same bits in any batch; without it they have not."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import invariant
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError, ModelUnsupported
from engine.model_runner import ModelRunner
from engine.request import Request
from tests.support import parity
from tests.support.parity import BLOCK, Configured, Outcome, Run, logits_of, request, run
from tests.support.tiny import random_prompts
from tests.support.tiny_models import SUPPORTED, save

PROMPTS = random_prompts(count=14, longest=60, seed=5)
NEEDLE = max(PROMPTS, key=len)
NUM_TOKENS = 20
OTHERS = [request(f"other{i}", prompt, max_tokens=12 + i) for i, prompt in enumerate(PROMPTS) if prompt != NEEDLE]
BATCHES: dict[str, dict[str, Any]] = {
    "crowd": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_slots": 4},
    "chunks of 37": {"max_num_batched_tokens": 37},
    "no chunks": {"scheduling": "iteration_level"},
    "recomputed": {"num_blocks": 16},
    "swapped": {"num_blocks": 16, "preemption": "swap", "num_host_blocks": parity.HOST_BLOCKS},
    "ahead": {"num_blocks": 16, "run_ahead": True},
}


@pytest.fixture(scope="module", params=["auto", "int8", "fp8"])
def runner(tiny_dir: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return parity.load(tiny_dir, batch_invariant=True, kv_dtype=request.param)


def needle(name: str = "needle", **options: Any) -> Request:
    return request(name, NEEDLE, **({"max_tokens": NUM_TOKENS, "logprobs": 5, "prompt_logprobs": 0} | options))


def bits(outcome: Outcome) -> tuple[Any, ...]:
    """Floats are equal when their bits are: none is zero or NaN."""
    return outcome.token_ids, outcome.logprobs, outcome.prompt_logprobs


def in_batch(runner: ModelRunner, changes: dict[str, Any]) -> Outcome:
    """The needle last, so that it is the one that is preempted, behind half of the others."""
    done = run(runner, [*OTHERS[:6], needle(), *OTHERS[6:]], **changes)
    if "num_blocks" in changes:
        assert done.counts["num_preemptions"] > 0
    return done.outcomes["needle", 0]


@pytest.mark.parametrize("changes", BATCHES.values(), ids=BATCHES)
def test_a_request_has_the_bits_it_has_alone(runner: ModelRunner, changes: dict[str, Any]) -> None:
    alone = run(runner, [needle()]).outcomes["needle", 0]

    assert bits(in_batch(runner, changes)) == bits(alone)


def test_without_the_mode_the_bits_depend_on_the_batch(tiny: ModelRunner) -> None:
    alone = run(tiny, [needle()]).outcomes["needle", 0]

    among = [in_batch(tiny, changes) for changes in BATCHES.values()]

    assert any(bits(outcome) != bits(alone) for outcome in among)
    assert all(outcome.token_ids == alone.token_ids for outcome in among)


def test_a_choice_among_several_has_the_bits_it_has_alone(runner: ModelRunner) -> None:
    several = {"n": 3, "temperature": 1.0, "seed": 7}
    alone = run(runner, [needle(temperature=1.0, seed=7)]).outcomes["needle", 0]

    among = run(runner, [*OTHERS, needle(**several)]).outcomes["needle", 0]

    assert bits(among) == bits(alone)


def test_a_prefix_from_the_cache_gives_the_bits_of_one_computed(runner: ModelRunner) -> None:
    alone = run(runner, [needle(prompt_logprobs=None)]).outcomes["needle", 0]
    done = Run(Engine(Configured(runner)), [*OTHERS, needle("before", max_tokens=3)]).to_end()

    done.add(needle(prompt_logprobs=None))
    done.to_end()

    found = done.outcomes["needle", 0]
    assert found.num_cached_tokens == (len(NEEDLE) - 1) // BLOCK * BLOCK
    assert bits(found) == bits(alone)


def test_a_resumed_request_goes_on_with_the_bits_it_had(runner: ModelRunner) -> None:
    whole = run(runner, [needle()]).outcomes["needle", 0]
    done = 9

    resumed = run(runner, [*OTHERS, needle(output_token_ids=whole.token_ids[:done])]).outcomes["needle", 0]

    assert (resumed.token_ids, resumed.logprobs) == (whole.token_ids[done:], whole.logprobs[done:])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_row_of_logits_has_the_bits_it_has_alone(runner: ModelRunner, data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3).filter(any), min_size=1, max_size=4))
    lens = [sum(counts) for counts in zip(*steps, strict=True)]
    prompts = [tuple(3 + (7 * i + 31 * row) % 200 for i in range(max(length, 1))) for row, length in enumerate(lens)]
    forward = partial(invariant._run, runner._model, runner.geometry, runner._kernels, 16)

    together = [step.split(counts) for step, counts in zip(forward(prompts, steps), steps, strict=True)]

    for row, (prompt, length) in enumerate(zip(prompts, lens, strict=True)):
        if length:
            assert torch.equal(torch.cat([parts[row] for parts in together]), forward([prompt], [[length]])[0])


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "phi3", "qwen3"])
def test_other_families_are_right_and_have_the_same_bits(family: str, tmp_path: Path) -> None:
    model_dir = save(family, SUPPORTED[family], tmp_path)
    runner = parity.load(model_dir, batch_invariant=True)
    prompts = [tuple(token % 90 + 3 for token in prompt) for prompt in PROMPTS]
    one = request("one", prompts[1] * 4, max_tokens=10, logprobs=3, prompt_logprobs=0)
    alone = run(runner, [one]).outcomes["one", 0]

    among = run(runner, [*(request(i, p, max_tokens=10) for i, p in enumerate(prompts)), one], max_num_batched_tokens=41)

    assert bits(among.outcomes["one", 0]) == bits(alone)
    assert alone.prompt_logprobs is not None
    runner._model.set_attn_implementation("eager")
    targets = torch.tensor(one.prompt_token_ids[1:]).unsqueeze(1)
    exact = logits_of(runner._model, one.prompt_token_ids)[:-1].log_softmax(1).gather(1, targets).squeeze(1)
    assert [entry.logprob for entry in alone.prompt_logprobs] == pytest.approx(exact.tolist(), abs=3e-4)


def test_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="batch_invariant: experts"):
        parity.load(save("qwen3_moe", SUPPORTED["qwen3_moe"], tmp_path), batch_invariant=True)


@pytest.mark.parametrize(
    ("options", "named"), [({"tensor_parallel": 2}, "tensor_parallel 2"), ({"device": "cuda:0"}, "device cuda:0")]
)
def test_it_is_refused_where_it_is_not_proven(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"batch_invariant: .*{named}; leave one out"):
        EngineConfig(model="m", batch_invariant=True, **options)


def test_a_model_whose_rows_depend_on_each_other_is_refused(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = runner._model.model.norm
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda hidden: forward(hidden) + hidden.sum() * 1e-6)

    with pytest.raises(ModelUnsupported, match="batch_invariant: on this machine"):
        invariant.probe(runner._model, runner.geometry, runner._kernels, 16)


def test_a_tile_leaves_no_thread_an_uneven_share(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.nn.Module()
    wide.layer = torch.nn.Linear(64, 4864, bias=False, device="meta")
    wide.get_output_embeddings = lambda: None  # type: ignore[assignment]
    wide.get_input_embeddings = lambda: torch.nn.Embedding(11, 64)  # type: ignore[assignment]

    rows = {}
    for num_threads in (1, 2, 3, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        rows[num_threads] = invariant.tile_rows(wide)

    assert rows == {1: 16, 2: 16, 3: 48, 4: 32}
