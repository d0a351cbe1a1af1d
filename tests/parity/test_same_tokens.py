"""Guarantee 1: the same tokens, however requests are batched, chunked, preempted, swapped, shared, resumed or aborted.

One property mixes all of it; beside it the policies by name. What is undisturbed is computed once for each request.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import CHOICES
from engine.core import Engine
from engine.model_runner import ModelRunner
from engine.request import Request
from tests.support.greedy import generate_greedy
from tests.support.parity import BLOCK, Configured, Key, Run, load, request, run
from tests.support.tiny import random_prompts

NUM_TOKENS = 14
STEM = random_prompts(1, 60, seed=3)[0][: 2 * BLOCK + 3]
PROMPTS = [*random_prompts(count=5, longest=36), STEM, (*STEM, 9), (*STEM[:BLOCK], 11, 12)]
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 20, "min_tokens": 5, "ignore_eos": False, "stop_token_ids": tuple(range(40, 60))},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"n": 3, "temperature": 1.0},
    {"n": 2, "temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": ((7, 2.0),), "banned_token_ids": (9, 10)},
    {"beam_width": 3},
    {"max_tokens": 0, "prompt_logprobs": 1},
)
SMALLEST = -(-max(map(len, PROMPTS)) // BLOCK) + 3 * -(-NUM_TOKENS // BLOCK) + 3
"""Blocks with which no request is too large for the pool, not even one with beams."""


def make(prompt: int, kind: int) -> Request:
    return request(f"{prompt}-{kind}", PROMPTS[prompt], **({"max_tokens": NUM_TOKENS, "seed": 100 + prompt} | KINDS[kind]))


class Undisturbed:
    """What each request gives alone, in a roomy pool, without cache, chunks or running ahead."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.tokens = cache(self._tokens)

    def _tokens(self, prompt: int, kind: int) -> dict[Key, tuple[int, ...]]:
        return run(self.runner, [make(prompt, kind)], prefix_caching=False).tokens


@pytest.fixture(scope="module")
def undisturbed(tiny: ModelRunner) -> Undisturbed:
    return Undisturbed(tiny)


@pytest.fixture(scope="module")
def undisturbed_int8(tiny_dir: Path) -> Undisturbed:
    return Undisturbed(load(tiny_dir, kv_dtype="int8"))


def resumed(whole: Request, told: dict[Key, tuple[int, ...]], cut: int) -> list[Request]:
    """The request sent again, choice by choice, after each has told up to `cut` tokens."""
    params = {name: getattr(whole.params, name) for name in whole.params.__slots__} | {"n": 1}
    return [
        request(whole.request_id, whole.prompt_token_ids, choice=choice, output_token_ids=ids[:cut], **params)
        for (_, choice), ids in sorted(told.items(), reverse=True)
    ]


CHANGES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(SMALLEST, SMALLEST + 25),
        "max_slots": st.integers(3, 16),
        "max_num_batched_tokens": st.sampled_from([3, 7, BLOCK, 20, 200]),
        "num_host_blocks": st.sampled_from([0, 1, 4, 60]),
        "preemption": st.sampled_from(CHOICES["preemption"]),
        "scheduling": st.sampled_from(("continuous", "continuous", "iteration_level", "request_level")),
        "reservation": st.sampled_from(("paged", "paged", *CHOICES["reservation"])),
        "max_scored_tokens": st.sampled_from([1, 5, 100]),
        "watermark_blocks": st.integers(0, 2),
        "run_ahead": st.booleans(),
        "chunked_prefill": st.booleans(),
        "prefill_first": st.booleans(),
        "prefix_caching": st.booleans(),
    }
)
JOBS = st.lists(
    st.tuples(
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, len(KINDS) - 1),
        st.integers(0, 12),  # the step before which it arrives
        st.sampled_from([None, None, None, 0, 1, 7, BLOCK, NUM_TOKENS - 1, NUM_TOKENS]),  # resumed after so many tokens
        st.sampled_from([None, None, None, 1, 3, 9]),  # aborted so many steps later
        st.sampled_from([0, 0, 0, 1, 4]),  # alone for so many steps
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda job: job[:2],
)


def check(
    undisturbed: Undisturbed, changes: dict[str, Any], jobs: list[tuple[int, int, int, int | None, int | None, int]]
) -> None:
    """Run the jobs under the configuration and compare each choice with what it gives alone."""
    for prompt, kind, *_ in jobs:
        undisturbed.tokens(prompt, kind)  # before the cache is filled: it poisons the blocks
    done = Run(Engine(Configured(undisturbed.runner, **changes)))
    expected: dict[Key, tuple[int, ...]] = {}
    aborted = set()
    for step in range(30):
        for prompt, kind, arrival, cut, abort_after, isolated_steps in jobs:
            whole = make(prompt, kind)
            if step == arrival:
                told = undisturbed.tokens(prompt, kind)
                is_resumed = cut is not None and not whole.params.beam_width and whole.params.max_tokens
                for part in resumed(whole, told, cut or 0) if is_resumed else [whole]:
                    done.add(replace(part, isolated_steps=isolated_steps))
                expected |= {key: ids[cut:] if is_resumed else ids for key, ids in told.items()}
            if abort_after is not None and step == arrival + abort_after:
                done.engine.abort(whole.request_id)
                done.engine.scheduler.check()
                aborted.add(whole.request_id)
        done.step()
    done.to_end()
    for key, ids in expected.items():
        outcome = done.outcomes[key]
        if key[0] in aborted and not outcome.reason:
            assert outcome.token_ids == ids[: len(outcome.token_ids)], key
        else:
            assert (outcome.token_ids, outcome.reason is None) == (ids, False), key
    host = done.engine.scheduler._tables._free_host_blocks
    assert len(host) == changes["num_host_blocks"], "host blocks are lost"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(changes=CHANGES, jobs=JOBS)
def test_no_mixture_of_neighbours_memory_and_policies_changes_a_token(
    undisturbed: Undisturbed, changes: dict[str, Any], jobs: list[Any]
) -> None:
    check(undisturbed, changes, jobs)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(changes=CHANGES, jobs=JOBS)
def test_the_same_holds_for_keys_and_values_in_int8(
    undisturbed_int8: Undisturbed, changes: dict[str, Any], jobs: list[Any]
) -> None:
    check(undisturbed_int8, changes | {"prefix_caching": False}, jobs)


@pytest.mark.parametrize("reservation", CHOICES["reservation"])
@pytest.mark.parametrize("scheduling", CHOICES["scheduling"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_every_policy_gives_the_tokens_of_generate(
    tiny: ModelRunner, generated: list[list[int]], scheduling: str, reservation: str, run_ahead: bool
) -> None:
    jobs = [request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]
    small = {"num_blocks": SMALLEST, "max_slots": 5, "max_num_batched_tokens": 12}

    done = run(tiny, jobs, scheduling=scheduling, reservation=reservation, run_ahead=run_ahead, **small)

    assert [list(done.tokens[str(i), 0]) for i in range(len(PROMPTS))] == generated
    if reservation in ("declared", "max", "pow2", "oracle"):
        assert done.counts["num_preemptions"] == 0


@pytest.fixture(scope="module")
def generated(tiny_dir: Path) -> list[list[int]]:
    return generate_greedy(tiny_dir, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 1, 3, 60])
def test_any_host_pool_swaps_what_fits_and_computes_the_rest_again(
    tiny: ModelRunner, generated: list[list[int]], num_host_blocks: int, run_ahead: bool
) -> None:
    jobs = [request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]

    done = run(tiny, jobs, num_blocks=10, preemption="swap", num_host_blocks=num_host_blocks, run_ahead=run_ahead)

    swapped, preempted = done.counts["num_swap_preemptions"], done.counts["num_preemptions"]
    assert [list(done.tokens[str(i), 0]) for i in range(len(PROMPTS))] == generated
    assert preempted > 0
    assert {0: swapped == 0, 60: swapped == preempted}.get(num_host_blocks, swapped < preempted)
    assert done.counts["num_swapped_out_blocks"] >= done.counts["num_swapped_in_blocks"]


def test_a_host_pool_of_just_the_blocks_of_one_sequence_takes_it(tiny: ModelRunner) -> None:
    jobs = [request("first", PROMPTS[0][:5], max_tokens=40), request("second", (5,) * BLOCK, max_tokens=20)]
    expected = run(tiny, jobs).tokens

    done = run(tiny, jobs, num_blocks=6, preemption="swap", num_host_blocks=3, prefix_caching=False)

    assert done.counts["num_swap_preemptions"] == done.counts["num_preemptions"] > 0
    assert done.tokens == expected


@pytest.mark.parametrize("kind", [0, 1, 4])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_request_resumed_at_any_point_goes_on_as_if_never_interrupted(
    tiny: ModelRunner, undisturbed: Undisturbed, kind: int, run_ahead: bool
) -> None:
    told = undisturbed.tokens(1, kind)

    for cut in range(len(told["1-" + str(kind), 0]) + 1):
        done = run(tiny, resumed(make(1, kind), told, cut), run_ahead=run_ahead)
        assert {key: told[key][:cut] + ids for key, ids in done.tokens.items()} == told


def test_running_ahead_computes_a_plain_batch_in_as_many_steps_and_one_more(tiny: ModelRunner) -> None:
    jobs = [request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]

    plain, ahead = run(tiny, jobs), run(tiny, jobs, run_ahead=True)

    assert ahead.tokens == plain.tokens
    assert ahead.counts["steps"] == plain.counts["steps"] + 1
