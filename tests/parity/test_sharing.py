"""Several choices of one prompt, and prompts that begin alike: the same tokens from fewer blocks."""

from typing import Any

import pytest

from engine.core import Engine
from engine.model_runner import ModelRunner
from engine.request import FinishReason, Request
from tests.support.parity import BLOCK, Configured, Key, Run, request, run
from tests.support.tiny import random_prompts

PROMPTS = random_prompts(count=4, longest=40)
N = 3
LONG = next(prompt for prompt in PROMPTS if len(prompt) > 3 * BLOCK and len(prompt) % BLOCK)
NUM_TOKENS = 16
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "penalised": {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
}


def choices(name: int, n: int, **options: Any) -> Request:
    return request(name, PROMPTS[name], **({"n": n, "seed": 40 + name, "max_tokens": NUM_TOKENS, "temperature": 1.0} | options))


def single(whole: Request, choice: int, **options: Any) -> Request:
    """One choice of `whole` as a request of its own."""
    params = {name: getattr(whole.params, name) for name in whole.params.__slots__} | {"n": 1}
    return request(whole.request_id, whole.prompt_token_ids, **(params | {"choice": choice} | options))


@pytest.fixture(scope="module")
def alone(tiny: ModelRunner) -> dict[str, dict[Key, tuple[int, ...]]]:
    """Each choice of each prompt as a lone request, by kind."""
    return {
        kind: {
            key: token_ids
            for i in range(len(PROMPTS))
            for choice in range(N)
            for key, token_ids in run(tiny, [single(choices(i, N, **options), choice)]).tokens.items()
        }
        for kind, options in KINDS.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"run_ahead": True},
        {"max_num_batched_tokens": 5, "max_slots": 5},
        {"num_blocks": 10},
        {"num_blocks": 10, "preemption": "swap", "num_host_blocks": 6, "run_ahead": True},
        {"num_blocks": 10, "prefix_caching": False},
        {"scheduling": "request_level", "run_ahead": True},
    ],
    ids=str,
)
def test_n_choices_equal_as_many_lone_requests(
    tiny: ModelRunner, alone: dict[str, dict[Key, tuple[int, ...]]], kind: str, changes: dict[str, Any]
) -> None:
    done = run(tiny, [choices(i, N, **KINDS[kind]) for i in range(len(PROMPTS))], **changes)

    assert done.tokens == alone[kind]
    assert (done.counts["num_preemptions"] > 0) == ("num_blocks" in changes)


@pytest.mark.parametrize("length", [3 * BLOCK, 3 * BLOCK + 1])
def test_choices_hold_the_prompt_once_and_copy_its_last_block_only_when_it_is_partly_filled(
    tiny: ModelRunner, length: int
) -> None:
    n, num_full = 4, 3
    done = Run(Engine(Configured(tiny)), [request("a", (LONG * 2)[:length], n=n, temperature=1.0, max_tokens=NUM_TOKENS)])
    prefill, first_writes = done.step().stats, done.step().stats

    assert prefill.kv.used_blocks == -(-length // BLOCK)
    assert first_writes.num_copied_blocks == (n - 1 if length % BLOCK else 0)
    assert first_writes.kv.used_blocks == num_full + n
    done.to_end()
    assert done.counts["num_copied_blocks"] == first_writes.num_copied_blocks


def test_prompts_that_begin_alike_hold_their_beginning_once(tiny: ModelRunner) -> None:
    prompts = [(*LONG[: 3 * BLOCK], 5 + i) for i in range(6)]
    expected = run(tiny, [request(i, p, max_tokens=NUM_TOKENS) for i, p in enumerate(prompts)], prefix_caching=False).tokens
    done = Run(Engine(Configured(tiny)), [request(i, p, max_tokens=NUM_TOKENS) for i, p in enumerate(prompts)])

    used = done.step().stats.kv.used_blocks
    done.to_end()

    assert used == 3 + len(prompts)
    assert done.counts["num_prefix_hits"] == 5 * 3 * BLOCK
    assert done.tokens == expected


@pytest.mark.parametrize("kind", KINDS)
def test_choices_of_a_prompt_that_is_in_the_cache_are_the_same(
    tiny: ModelRunner, alone: dict[str, dict[Key, tuple[int, ...]]], kind: str
) -> None:
    whole = [choices(i, N, **KINDS[kind]) for i in range(len(PROMPTS))]
    engine = Engine(Configured(tiny))
    Run(engine, whole).to_end()

    again = Run(engine, whole).to_end()

    assert again.counts["num_prefix_hits"] > 0
    assert again.tokens == alone[kind]


def test_with_max_tokens_0_each_choice_ends_at_once_and_empty(tiny: ModelRunner) -> None:
    done = run(tiny, [choices(0, 3, max_tokens=0)])

    assert {key: (o.token_ids, o.reason, len(o.events)) for key, o in done.outcomes.items()} == {
        ("0", choice): ((), FinishReason.LENGTH, 1) for choice in range(3)
    }


def test_a_stop_id_in_one_choice_ends_no_other(tiny: ModelRunner, alone: dict[str, dict[Key, tuple[int, ...]]]) -> None:
    expected = [alone["sampled"]["1", choice] for choice in range(N)]
    stop = next(t for t in expected[2][3:] if all(t not in other for k, other in enumerate(expected) if k != 2))

    done = run(tiny, [choices(1, N, stop_token_ids=(stop,))])

    assert done.tokens["1", 2] == expected[2][: expected[2].index(stop) + 1]
    assert [done.tokens["1", choice] for choice in (0, 1)] == [expected[choice] for choice in (0, 1)]
    assert [done.outcomes["1", k].reason for k in range(N)] == ["length", "length", "stop"]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("choice", [0, 2])
def test_an_abort_of_one_choice_leaves_the_others_alone(
    tiny: ModelRunner, alone: dict[str, dict[Key, tuple[int, ...]]], choice: int, run_ahead: bool
) -> None:
    done = Run(Engine(Configured(tiny, run_ahead=run_ahead)), [choices(1, N)])
    done.until(lambda run: all(len(run.outcomes["1", k].token_ids) >= 3 for k in range(N)))
    before = done.engine.idle_report().stats.kv.used_blocks

    done.engine.abort("1", choice)
    done.engine.scheduler.check()
    after = done.engine.idle_report().stats.kv.used_blocks
    done.to_end()

    assert after < before
    assert done.outcomes["1", choice].reason is None
    others = [k for k in range(N) if k != choice]
    assert [done.tokens["1", k] for k in others] == [alone["sampled"]["1", k] for k in others]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run_ahead", [False, True])
def test_choices_resumed_at_any_point_go_on_as_if_never_interrupted(
    tiny: ModelRunner, alone: dict[str, dict[Key, tuple[int, ...]]], kind: str, run_ahead: bool
) -> None:
    whole = choices(2, N, **KINDS[kind])
    expected = {key: ids for key, ids in alone[kind].items() if key[0] == "2"}
    for cut in range(NUM_TOKENS + 1):
        parts = [
            single(whole, k, output_token_ids=expected["2", k][: max(cut - 3 * k, 0)]) for k in (2, 0, 1)
        ]  # each at a point of its own
        done = run(tiny, parts, num_blocks=10, run_ahead=run_ahead)
        assert {key: expected[key][: max(cut - 3 * key[1], 0)] + ids for key, ids in done.tokens.items()} == expected
