"""Beam search inside the engine, held against transformers' `generate` with as many beams."""

from functools import cache
from typing import Any

import pytest
import torch

from engine.core import Engine
from engine.errors import RequestRefused
from engine.model_runner import ModelRunner
from engine.request import FinishReason, Request
from tests.support.parity import BLOCK, Configured, Outcome, Run, request, run
from tests.support.tiny import EOS_ID, random_prompts

PROMPTS = random_prompts(count=6, longest=40)
NUM_TOKENS = 16
STOPS = (82, 141, 158)
"""Ids beside EOS that the beams of these prompts meet."""
ENDS: dict[str, dict[str, Any]] = {
    "none": {},
    "eos": {"ignore_eos": False},
    "several": {"ignore_eos": False, "stop_token_ids": STOPS},
    "min_tokens": {"ignore_eos": False, "stop_token_ids": STOPS, "min_tokens": 6},
}


def beams(name: int, width: int, **options: Any) -> Request:
    return request(name, PROMPTS[name], **({"beam_width": width, "max_tokens": NUM_TOKENS} | options))


class Reference:
    """What transformers makes of a search, each computed once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.search = cache(self._search)

    def _search(self, name: int, width: int, ends: str) -> list[tuple[tuple[int, ...], float]]:
        options = ENDS[ends]
        prompt = PROMPTS[name]
        stops = [] if not options else [EOS_ID, *options.get("stop_token_ids", ())]
        out = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=options.get("min_tokens"),
            do_sample=False,
            eos_token_id=stops or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        found = []
        for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
            end = next((index + 1 for index, token_id in enumerate(row) if token_id in stops), len(row))
            found.append((tuple(row[:end]), score))
        return found


@pytest.fixture(scope="module")
def reference(tiny_model: Any) -> Reference:
    return Reference(tiny_model)


def assert_same(outcomes: dict[tuple[str, int], Outcome], name: int, expected: list[tuple[tuple[int, ...], float]]) -> None:
    found = [outcomes[str(name), choice] for choice in range(len(expected))]
    assert [outcome.token_ids for outcome in found] == [token_ids for token_ids, _ in expected]
    assert [outcome.score for outcome in found] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert [len(outcome.events) for outcome in found] == [1] * len(found)
    for outcome in found:
        is_stop = len(outcome.token_ids) < NUM_TOKENS
        assert outcome.reason in ((FinishReason.STOP,) if is_stop else (FinishReason.LENGTH, FinishReason.STOP))


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("ends", ENDS)
def test_sequences_and_scores_equal_generate(tiny: ModelRunner, reference: Reference, width: int, ends: str) -> None:
    done = run(tiny, [beams(i, width, **ENDS[ends]) for i in range(len(PROMPTS))], max_num_batched_tokens=17)

    for i in range(len(PROMPTS)):
        assert_same(done.outcomes, i, reference.search(i, width, ends))
    has_stopped = any(outcome.reason is FinishReason.STOP for outcome in done.outcomes.values())
    assert {"none": not has_stopped, "several": has_stopped}.get(ends, True)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 22},
        {"num_blocks": 22, "preemption": "swap", "num_host_blocks": 30},
        {"scheduling": "request_level"},
        {"scheduling": "iteration_level"},
        {"reservation": "declared", "num_blocks": 60},
        {"prefix_caching": False, "prefill_first": True, "num_blocks": 30},
    ],
    ids=str,
)
def test_searches_among_samples_equal_generate_and_leave_the_samples_alone(
    tiny: ModelRunner, reference: Reference, changes: dict[str, Any], run_ahead: bool
) -> None:
    samples = [request(f"s{i}", PROMPTS[i], n=1 + i % 2, temperature=0.9, seed=10 + i, max_tokens=30) for i in range(4)]
    widths = {1: 2, 2: 4, 4: 3}
    alone = run(tiny, samples).tokens

    searches = [beams(i, width, **ENDS["several"]) for i, width in widths.items()]
    done = run(tiny, [*samples[:2], *searches, *samples[2:]], run_ahead=run_ahead, **changes)

    assert {key: done.tokens[key] for key in alone} == alone
    for i, width in widths.items():
        assert_same(done.outcomes, i, reference.search(i, width, "several"))
    assert (done.counts["num_preemptions"] > 0) == (changes.get("num_blocks", 60) < 60)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_cancelling_a_search_frees_every_branch(tiny: ModelRunner, num_steps: int, run_ahead: bool) -> None:
    done = Run(Engine(Configured(tiny, run_ahead=run_ahead)), [beams(1, 4), beams(2, 3)])
    for _ in range(num_steps):
        done.step()

    done.engine.abort("1")
    done.engine.abort("2")
    done.engine.scheduler.check()

    assert done.engine.idle_report().stats.kv.used_blocks == 0
    assert done.engine.scheduler.num_running == 0
    done.to_end()
    assert not done.outcomes


@pytest.mark.parametrize("num_blocks", [4, 5, 9, 13])
def test_a_lone_search_that_outgrows_the_pool_ends_with_length_and_says_why(tiny: ModelRunner, num_blocks: int) -> None:
    done = run(tiny, [request("a", PROMPTS[0][:3], beam_width=4, max_tokens=200)], num_blocks=num_blocks)

    assert done.counts["num_preemptions"] == 0
    assert {(len(o.token_ids), o.reason, o.detail) for o in done.outcomes.values()} == {
        (num_blocks // 4 * BLOCK - 3, FinishReason.LENGTH, "kv_capacity")
    }


def test_of_a_search_that_outgrows_the_pool_only_the_beams_that_were_cut_say_so(tiny: ModelRunner) -> None:
    done = run(tiny, [request("a", PROMPTS[0][:3], beam_width=4, max_tokens=200, stop_token_ids=STOPS)], num_blocks=9)

    assert {(o.reason, o.detail) for o in done.outcomes.values()} == {
        (FinishReason.STOP, ""),
        (FinishReason.LENGTH, "kv_capacity"),
    }


def test_a_search_tells_the_log_probabilities_of_its_prompt_once(tiny: ModelRunner) -> None:
    alone = run(tiny, [beams(1, 1, beam_width=0, prompt_logprobs=2, max_tokens=0)])
    done = run(tiny, [beams(1, 3, prompt_logprobs=2)], max_num_batched_tokens=5)

    (wanted,) = alone.outcomes.values()
    first, *others = done.outcomes.values()
    assert [token_id for entry in first.prompt_logprobs for token_id, _ in entry.top] == [
        token_id for entry in wanted.prompt_logprobs for token_id, _ in entry.top
    ]
    assert [o.prompt_logprobs for o in others] == [None, None]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_search_without_room_to_search_ends_each_choice(tiny: ModelRunner, max_tokens: int) -> None:
    done = run(tiny, [beams(1, 3, max_tokens=max_tokens)])

    assert {(len(o.token_ids), o.reason) for o in done.outcomes.values()} == {(max_tokens, FinishReason.LENGTH)}
    assert len({o.token_ids for o in done.outcomes.values()}) == (3 if max_tokens else 1)


def test_a_search_of_one_beam_is_greedy(tiny: ModelRunner) -> None:
    greedy = run(tiny, [request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]).tokens

    assert run(tiny, [beams(i, 1) for i in range(len(PROMPTS))], run_ahead=True).tokens == greedy


@pytest.mark.parametrize("num_blocks", [9, 16])
def test_a_search_preempted_while_its_tokens_are_in_flight_begins_again(tiny: ModelRunner, num_blocks: int) -> None:
    requests = [request("first", PROMPTS[1], max_tokens=40), beams(0, 4, max_tokens=20)]
    room = {"num_blocks": num_blocks, "prefix_caching": False}
    expected = run(tiny, requests[1:], **room).tokens

    done = run(tiny, requests, run_ahead=True, **room)

    assert done.counts["num_preemptions"] > 0
    assert {key: done.tokens[key] for key in expected} == expected


@pytest.mark.parametrize("width", [2, 4, 6])
def test_a_lone_search_with_one_block_for_each_beam_goes_on_in_them(tiny: ModelRunner, width: int) -> None:
    search = request("a", PROMPTS[0][:3], beam_width=width, max_tokens=5)
    expected = run(tiny, [search]).tokens

    done = run(tiny, [search], num_blocks=width)

    assert done.counts["num_preemptions"] == 0
    assert done.tokens == expected


def test_more_beams_than_a_step_has_tokens_are_refused_with_the_numbers(tiny: ModelRunner) -> None:
    done = Run(Engine(Configured(tiny, max_num_batched_tokens=3)), [beams(0, 3), request("n", PROMPTS[1], n=4, max_tokens=5)])

    with pytest.raises(RequestRefused, match=r"beam_width: 4 is over the limit: at most 3.*token_budget"):
        done.add(beams(1, 4))
    done.to_end().assert_all_ended()


@pytest.mark.parametrize("reservation", ["declared", "ratio", "max", "pow2", "oracle"])
def test_beams_share_what_was_set_aside_for_their_search(tiny: ModelRunner, reservation: str) -> None:
    expected = run(tiny, [beams(1, 3)]).tokens

    done = run(tiny, [beams(1, 3)], reservation=reservation, num_blocks=12)

    assert done.counts["num_preemptions"] == 0
    assert done.tokens == expected
