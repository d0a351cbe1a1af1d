"""Suspects in a whole engine: what they and their neighbours yield, who is in a step, and which faults may be tried again."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.batch import ModelInput
from engine.config import EngineConfig
from engine.core import MAX_STALLED_STEPS, Engine
from engine.messages import StepReport, TokenEvent
from engine.model_runner import ModelRunner
from engine.request import FinishReason, Request
from engine.reservation import Fit
from tests.support import poisoned_engine
from tests.support.parity import BLOCK, Configured, Run, request, run
from tests.support.tiny import random_prompts
from worker.bridge import EngineProcess
from worker.errors import EngineUnavailable

PROMPTS = random_prompts(count=6, longest=40, seed=5)
NUM_TOKENS = 14
STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "choices": {"n": 3, "temperature": 1.0},
    "beams": {"beam_width": 3},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5},
}
PLACES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 8},
    "tight": {"num_blocks": 13, "max_slots": 5, "num_host_blocks": 9},
    "static": {"scheduling": "request_level"},
}


class Watched(Configured):
    """Counts the sequences of each step."""

    def __init__(self, runner: ModelRunner, **changes: Any) -> None:
        super().__init__(runner, **changes)
        self.widths: list[int] = []

    def forward(self, model_input: ModelInput) -> Any:
        self.widths.append(len(model_input.context_lens))
        return super().forward(model_input)


def neighbours() -> list[Request]:
    return [request(f"n{i}", PROMPTS[i], max_tokens=NUM_TOKENS, temperature=i % 2 * 1.0, seed=i) for i in range(4)]


def suspect(**options: Any) -> Request:
    return request("s", (*PROMPTS[4], *PROMPTS[5]), isolated_steps=STEPS, max_tokens=NUM_TOKENS, **options)


def step_until_cleared(done: Run) -> None:
    for _ in range(40):
        if done.step().cleared:
            return
    raise AssertionError("nobody is cleared")


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_suspects_and_their_neighbours_yield_what_they_yield_undisturbed(
    tiny: ModelRunner, kind: str, place: str, run_ahead: bool
) -> None:
    jobs = [*neighbours(), suspect(**KINDS[kind])]
    expected = {key: ids for job in jobs for key, ids in run(tiny, [job], prefix_caching=False).tokens.items()}
    done = Run(Engine(Configured(tiny, run_ahead=run_ahead, **PLACES[place])), jobs[:4])
    done.step()
    done.step()

    done.add(jobs[4])
    cleared = []
    while done.engine.has_work:
        cleared += done.step().cleared

    done.assert_all_ended()
    assert done.tokens == expected
    assert cleared == ["s"]


def test_a_suspect_is_the_only_one_in_its_steps(tiny: ModelRunner) -> None:
    watched = Watched(tiny, max_num_batched_tokens=BLOCK)
    done = Run(Engine(watched), [request("n", PROMPTS[0][:4], max_tokens=60)])
    done.step()

    done.add(suspect())
    step_until_cleared(done)
    done.step()

    num_chunks = -(-len(suspect().prompt_token_ids) // BLOCK)
    assert watched.widths == [1] + [1] * (num_chunks + STEPS) + [2]
    assert done.outcomes["s", 0].token_ids == run(tiny, [suspect()]).tokens["s", 0][: 1 + STEPS + 1]


def test_a_resumed_suspect_goes_on_choice_by_choice_and_alone(tiny: ModelRunner) -> None:
    whole = suspect(n=3, temperature=1.0)
    told = run(tiny, [whole]).tokens
    params = replace(whole.params, n=1)
    parts = [replace(whole, params=params, choice=choice, output_token_ids=told["s", choice][:4]) for choice in (2, 0, 1)]
    watched = Watched(tiny)
    done = Run(Engine(watched), neighbours())
    done.step()
    for part in parts:
        done.add(part)

    step_until_cleared(done)
    done.to_end()

    assert watched.widths[1 : 2 + STEPS] == [3] * (1 + STEPS)
    assert {key: told[key][:4] + ids for key, ids in done.tokens.items() if key[0] == "s"} == told


@pytest.fixture
def poisoned(tiny_dir: Path) -> Iterator[EngineProcess]:
    """The real engine, which dies of prompts with the token 13."""
    config = EngineConfig(model=str(tiny_dir), dtype="float32", kv_blocks=50, num_threads=1)
    process = EngineProcess(config, poisoned_engine.command(13))
    yield process
    process.stop()


def receive_all(process: EngineProcess, events: list[TokenEvent]) -> None:
    while message := process.receive(60.0):
        events += message.events if isinstance(message, StepReport) else ()


def test_a_poisonous_prompt_kills_the_real_engine_in_the_middle_of_a_step(poisoned: EngineProcess) -> None:
    for job in (request("n", (5, 6), max_tokens=400), request("s", (5, 13), max_tokens=9, isolated_steps=8)):
        poisoned.send(job)

    events: list[TokenEvent] = []
    with pytest.raises(EngineUnavailable, match="killed by signal 9"):
        receive_all(poisoned, events)

    assert [(event.request_id, event.start) for event in events] == [("s", 0), ("s", 1), ("s", 2)]


# What may be tried again


class NaN(Configured):
    """A model that is broken."""

    def forward(self, model_input: ModelInput) -> Any:
        return super().forward(model_input) * float("nan")


@pytest.mark.parametrize("kind", ["greedy", "choices", "beams"])
def test_broken_logits_may_be_tried_again(tiny: ModelRunner, kind: str) -> None:
    done = Run(Engine(NaN(tiny)), [request("a", PROMPTS[0], **KINDS[kind])]).to_end()

    ends = [outcome.events[-1] for outcome in done.outcomes.values()]
    assert {(end.finish_reason, end.may_retry) for end in ends} == {(FinishReason.ERROR, True)}


def test_what_was_never_scheduled_may_be_tried_again(tiny: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduler.fit", lambda *_: Fit.LATER)

    done = Run(Engine(Configured(tiny)), [request("a", PROMPTS[0])]).to_end(2 * MAX_STALLED_STEPS)

    assert done.outcomes["a", 0].events[-1].may_retry


def test_an_end_that_is_no_error_is_not_tried_again(tiny: ModelRunner) -> None:
    done = run(tiny, neighbours())

    assert not any(event.may_retry for outcome in done.outcomes.values() for event in outcome.events)
