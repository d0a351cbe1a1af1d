"""What tests of the queue side rely on in the fake engine."""

from collections.abc import Iterable

from engine.messages import StepReport
from engine.request import FinishReason, Request, SamplingParams
from tests.support.fake_engine import ALWAYS_FAULT_ID, FAULT_ID, FakeEngine, next_token


def request(name: str, first: int = 5, *, isolated_steps: int = 0, **options: object) -> Request:
    params = SamplingParams(max_tokens=6)
    return Request(request_id=name, prompt_token_ids=(first,), params=params, isolated_steps=isolated_steps, **options)  # type: ignore[arg-type]


def reports(engine: FakeEngine, requests: Iterable[Request]) -> list[StepReport]:
    for each in requests:
        engine.add_request(each)
    found = []
    while engine.has_work:
        found.append(engine.step())
    return found


def test_a_suspect_runs_alone_and_is_told_to_be_cleared() -> None:
    found = reports(FakeEngine(4, 0.0), [request("a"), request("b", isolated_steps=2)])

    assert [sorted(event.request_id for event in report.events) for report in found[:4]] == [["b"]] * 3 + [["a", "b"]]
    assert [report.cleared for report in found[:4]] == [(), (), ("b",), ()]
    assert {report.stats.slots.total for report in found} == {4}


def test_a_suspect_that_ends_in_its_window_is_not_cleared() -> None:
    found = reports(FakeEngine(4, 0.0), [request("a"), request("b", isolated_steps=9)])

    assert [report.cleared for report in found] == [()] * 12


def test_a_fault_may_be_tried_again_and_is_met_once() -> None:
    engine = FakeEngine(4, 0.0)
    resumed = {"output_token_ids": (8, 9)}

    first, last = reports(engine, [request("a", FAULT_ID)])[-1].events[-1], reports(engine, [request("a", FAULT_ID, **resumed)])
    again = reports(engine, [request("b", ALWAYS_FAULT_ID, **resumed)])[-1].events[-1]

    assert (first.start, first.finish_reason, first.may_retry) == (3, FinishReason.ERROR, True)
    assert last[-1].events[-1].finish_reason is FinishReason.LENGTH
    assert last[0].events[0].token_ids == (next_token(request("a", FAULT_ID), 2),)
    assert (again.start, again.finish_reason, again.may_retry) == (3, FinishReason.ERROR, True)
