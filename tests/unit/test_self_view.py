"""What a worker says of the requests inside an engine, from what each last did and what the engine last said."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.stats import StepStats
from worker.metrics import EngineState
from worker.self_view import _engine, _requests
from worker.snapshot import MAX_ID

LAST_BUT_ONE, LAST = 10.0, 11.0
READER: Any = SimpleNamespace(step_times=(LAST_BUT_ONE, LAST), num_slots=4, serving=object())


def attempt(last_token_at: float = LAST, *, job_id: str = "a", beam_width: int = 0, **changes: Any) -> Any:
    fields = {
        "delivery": SimpleNamespace(job_id=job_id, num_logged=0),
        "job": SimpleNamespace(max_tokens=100, num_choices=2, beam_width=beam_width),
        "priority": "normal",
        "engine": 0,
        "width": 1,
        "prompt_token_ids": (1, 2, 3),
        "num_tokens": 7 if last_token_at else 0,
        "taken_at": 0.0,
        "last_token_at": last_token_at,
        "is_alone": False,
        "has_begun_alone": False,
    }
    return SimpleNamespace(**fields | changes)


def said(**numbers: int) -> EngineState:
    return EngineState(last=StepStats(**numbers))  # type: ignore[arg-type]


def phases(*attempts: Any, waiting: int = 0) -> list[str]:
    return [view.phase for view in _requests(attempts, READER, said(num_waiting=waiting))]


NEW = attempt(0.0)
PREEMPTED = attempt(5.0)


@pytest.mark.parametrize("at", [LAST, LAST_BUT_ONE])
def test_who_had_a_token_in_the_last_two_steps_decodes(at: float) -> None:
    assert phases(attempt(at), waiting=0) == ["decode"]


def test_who_had_none_is_in_prefill_when_nobody_waits() -> None:
    assert phases(attempt(), NEW, PREEMPTED) == ["decode", "prefill", "prefill"]


def test_who_had_none_waits_when_as_many_wait() -> None:
    assert phases(attempt(), NEW, PREEMPTED, waiting=2) == ["decode", "waiting", "waiting"]


def test_which_of_them_waits_is_not_known_when_some_do() -> None:
    assert phases(attempt(), NEW, PREEMPTED, waiting=1) == ["decode", "starting", "starting"]


def test_more_than_there_are_slots_cannot_all_be_in_prefill() -> None:
    assert phases(attempt(), NEW, NEW, NEW, NEW) == ["decode", *["starting"] * 4]


def test_a_suspect_waits_until_it_runs_alone_and_holds_the_others_then() -> None:
    suspect = {"is_alone": True}
    assert phases(attempt(0.0, **suspect), attempt(), waiting=1) == ["waiting", "decode"]
    assert phases(attempt(0.0, **suspect, has_begun_alone=True), PREEMPTED) == ["alone", "held"]


def test_a_beam_search_tells_nothing_of_its_steps() -> None:
    assert phases(attempt(0.0, beam_width=2, width=2)) == ["beam"]


def test_tokens_are_those_of_all_choices_and_ids_are_cut() -> None:
    [view] = _requests([attempt(job_id="x" * 128, width=2)], READER, said())
    assert (len(view.id), view.tokens, view.max_tokens, view.prompt_tokens, view.width) == (MAX_ID, 7, 200, 3, 2)


def test_an_engine_sums_the_slots_of_its_requests_by_phase() -> None:
    found = _requests([attempt(width=2), attempt(), NEW], READER, said())
    config: Any = SimpleNamespace(device="cpu")
    engine = _engine(config, READER, said(num_running=4, num_slots_taken=3), found)
    assert (engine.phases["decode"], engine.phases["prefill"], engine.taken, engine.slots) == (3, 1, 3, 4)
