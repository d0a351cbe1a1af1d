"""No request can fail, delay for ever or change another: broken logits, no memory, limits, neighbours, stale state."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import ModelInput
from engine.core import MAX_STALLED_STEPS, Engine
from engine.errors import RequestRefused
from engine.model_runner import ModelRunner
from engine.request import FinishReason
from engine.reservation import Fit
from tests.support.parity import Configured, Run, logits_of, request, run
from tests.support.tiny import random_prompts

PROMPTS = random_prompts(count=10, longest=40)
NUM_TOKENS = 12


class Broken(Configured):
    """Rows of logits become NaN in some steps."""

    def __init__(self, runner: ModelRunner, rows: Mapping[int, slice], **changes: Any) -> None:
        """`rows`: step, counted from 0, to rows."""
        super().__init__(runner, **changes)
        self._rows = rows
        self._step = -1

    def forward(self, model_input: ModelInput) -> Tensor:
        logits = super().forward(model_input).clone()
        self._step += 1
        logits[self._rows.get(self._step, slice(0))] = float("nan")
        return logits


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "choices": {"n": 3, "temperature": 1.0},
    "beams": {"beam_width": 3},
}


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_nan_fail_their_request_once_and_no_other(tiny: ModelRunner, kind: str, step: int, run_ahead: bool) -> None:
    requests = [
        request("bad", PROMPTS[1], max_tokens=NUM_TOKENS, **KINDS[kind]),
        request("good", PROMPTS[2], max_tokens=NUM_TOKENS),
    ]
    expected = run(tiny, requests).tokens["good", 0]
    width = max(requests[0].params.n, requests[0].params.beam_width)
    steps = (step, step + 1) if width == 1 and run_ahead else (step,)  # launched before the failure is read: broken as well
    broken = Broken(tiny, {each: slice(0, width) for each in steps}, run_ahead=run_ahead)

    done = Run(Engine(broken), requests).to_end()

    done.assert_all_ended()
    assert done.tokens["good", 0] == expected
    failed = [key for key, outcome in done.outcomes.items() if outcome.reason is FinishReason.ERROR]
    assert sorted(failed) == [("bad", choice) for choice in range(width)]


def test_one_broken_beam_fails_its_search_with_an_end_for_each_choice(tiny: ModelRunner) -> None:
    requests = [request("bad", PROMPTS[1], max_tokens=NUM_TOKENS, beam_width=4), request("good", PROMPTS[2], max_tokens=3)]

    done = Run(Engine(Broken(tiny, {3: slice(2, 3)})), requests).to_end()

    assert {key: (o.reason, o.token_ids) for key, o in done.outcomes.items() if key[0] == "bad"} == {
        ("bad", choice): (FinishReason.ERROR, ()) for choice in range(4)
    }


def test_a_choice_of_nan_fails_alone(tiny: ModelRunner) -> None:
    choices = request("a", PROMPTS[1], n=3, temperature=1.0, max_tokens=NUM_TOKENS)
    expected = run(tiny, [choices]).tokens

    done = Run(Engine(Broken(tiny, {2: slice(1, 2)})), [choices]).to_end()

    assert done.outcomes["a", 1].reason is FinishReason.ERROR
    assert done.tokens == expected | {("a", 1): expected["a", 1][:2]}


def test_no_event_follows_for_what_was_aborted_while_its_broken_row_was_in_flight(tiny: ModelRunner) -> None:
    requests = [request("gone", PROMPTS[1], max_tokens=NUM_TOKENS), request("good", PROMPTS[2], max_tokens=NUM_TOKENS)]
    done = Run(Engine(Broken(tiny, {0: slice(0, 1)}, run_ahead=True)), requests)
    done.step()

    done.engine.abort("gone")
    done.to_end()

    assert {key: len(outcome.token_ids) for key, outcome in done.outcomes.items()} == {("good", 0): NUM_TOKENS}


class Cramped(Configured):
    """A device without memory for more than so many sequences in a step."""

    def __init__(self, runner: ModelRunner, most: int, **changes: Any) -> None:
        super().__init__(runner, **changes)
        self._most = most
        self.num_refused = 0

    def forward(self, model_input: ModelInput) -> Tensor:
        if len(model_input.context_lens) > self._most:
            self.num_refused += 1
            raise torch.OutOfMemoryError("no memory")
        return super().forward(model_input)


@pytest.mark.parametrize("most", [1, 3, 6])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_without_memory_is_computed_in_parts_and_no_request_is_lost(
    tiny: ModelRunner, most: int, run_ahead: bool
) -> None:
    def requests(like: str) -> list[Any]:
        kinds: list[dict[str, Any]] = [
            {},
            {"n": 3, "temperature": 1.0},
            {"prompt_logprobs": 1},
            {"logprobs": 2},
            {"beam_width": 2},
        ]
        prompts = [PROMPTS[i % 4] for i in range(10)]  # shared: one fills blocks that another reads in the same step
        return [request(f"{like}{i}", prompts[i], max_tokens=NUM_TOKENS, **kinds[i % 5]) for i in range(10)]

    expected = run(tiny, requests("a")).tokens
    cramped = Cramped(tiny, most, run_ahead=run_ahead)

    done = Run(Engine(cramped), requests("a")).to_end()

    assert cramped.num_refused > 0
    done.assert_all_ended()
    assert done.tokens == expected


def test_a_lone_sequence_without_memory_is_the_engines_failure(tiny: ModelRunner) -> None:
    done = Run(Engine(Cramped(tiny, 0)), [request("a", PROMPTS[0], max_tokens=1)])

    with pytest.raises(torch.OutOfMemoryError):
        done.step()


@pytest.mark.parametrize(("length", "num_generated"), [(62, 2), (63, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_just_below_the_models_length_is_served_to_that_length(
    tiny: ModelRunner, kind: str, length: int, num_generated: int
) -> None:
    done = run(tiny, [request("a", (5,) * length, **KINDS[kind])], max_model_len=64)

    assert {(len(o.token_ids), o.reason, o.detail) for o in done.outcomes.values()} == {
        (num_generated, FinishReason.LENGTH, "model_length")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_the_models_length_and_one_longer_are_refused(tiny: ModelRunner, kind: str) -> None:
    done = Run(Engine(Configured(tiny, max_model_len=64)), [request("a", PROMPTS[0], max_tokens=3)])

    for length in (64, 65):
        with pytest.raises(RequestRefused, match=f"prompt: {length} tokens is over the limit: at most 63"):
            done.add(request("b", (5,) * length, **KINDS[kind]))
    done.to_end()

    assert done.outcomes["a", 0].reason is FinishReason.LENGTH


def test_a_second_batch_has_nothing_of_the_first_although_it_uses_the_same_ids(tiny: ModelRunner) -> None:
    first, second = ([request(i, PROMPTS[i + shift], max_tokens=NUM_TOKENS) for i in range(5)] for shift in (0, 5))
    expected = run(tiny, second).tokens
    engine = Engine(Configured(tiny, num_blocks=20))
    Run(engine, first).to_end()

    assert Run(engine, second).to_end().tokens == expected


def test_a_stalled_head_fails_alone_and_leaves_its_other_choices_to_their_own_end(
    tiny: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.scheduler.fit", lambda *_: Fit.LATER)
    parts = [request("a", PROMPTS[0], choice=choice, output_token_ids=(7,), max_tokens=4) for choice in (0, 1)]
    done = Run(Engine(Configured(tiny)), parts).to_end(3 * MAX_STALLED_STEPS)

    done.assert_all_ended()
    assert {outcome.reason for outcome in done.outcomes.values()} == {FinishReason.ERROR}


class Recorded(Configured):
    """Keeps the logits of each step by row."""

    def __init__(self, runner: ModelRunner, **changes: Any) -> None:
        super().__init__(runner, **changes)
        self.steps: list[Tensor] = []

    def forward(self, model_input: ModelInput) -> Tensor:
        self.steps.append(super().forward(model_input))
        return self.steps[-1]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 33])
def test_a_needle_among_others_has_the_tokens_and_logits_it_has_alone(tiny: ModelRunner, tiny_model: Any, length: int) -> None:
    needle = request("needle", (PROMPTS[1] * 2)[:length], max_tokens=NUM_TOKENS)
    others = [request(i, prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(random_prompts(9, 60, seed=length))]
    alone, crowd = Recorded(tiny), Recorded(tiny)

    expected = Run(Engine(alone), [needle]).to_end().tokens["needle", 0]
    found = Run(Engine(crowd), [needle, *others]).to_end().tokens["needle", 0]  # first in order: row 0

    assert found == expected
    for one, among in zip(alone.steps, crowd.steps, strict=True):
        torch.testing.assert_close(among[0], one[0], atol=1e-4, rtol=1e-5)
    own = logits_of(tiny_model, needle.prompt_token_ids + expected)[length - 1 : -1]
    torch.testing.assert_close(torch.stack([step[0] for step in alone.steps]), own, atol=3e-4, rtol=1e-5)


@pytest.mark.parametrize("same_salt", [True, False])
def test_only_requests_of_the_same_salt_share_a_prefix(tiny: ModelRunner, same_salt: bool) -> None:
    done = Run(Engine(Configured(tiny)), [request("a", PROMPTS[1], max_tokens=NUM_TOKENS, cache_salt=b"one")]).to_end()

    done.add(request("b", PROMPTS[1], max_tokens=NUM_TOKENS, cache_salt=b"one" if same_salt else b"two"))
    done.to_end()

    assert (done.counts["num_prefix_hits"] > 0) == same_salt
    assert done.tokens["b", 0] == done.tokens["a", 0]
