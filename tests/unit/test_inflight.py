"""The table of attempts: what the engine is sent, and in which order."""

import threading

import pytest

from engine.messages import Abort
from engine.request import Request, SamplingParams
from worker.attempt import CANCELLED, RELEASED_BY_DRAIN, Attempt, Ending
from worker.claims import Delivery
from worker.inflight import InFlight
from worker.metrics import Metrics
from worker.output import Output
from worker.text import Detokenizer, StopMatcher


class NoText(Detokenizer):
    def __init__(self) -> None:
        pass

    def flush(self) -> str:
        return ""


class Table(InFlight):
    """Keeps what it sends, and can be made to meet an ending from another thread while a request is on its way out."""

    def __init__(self) -> None:
        self.sent: list[Request | Abort] = []
        self.meanwhile: threading.Thread | None = None
        super().__init__(Metrics(), self._note)

    def _note(self, message: Request | Abort) -> None:
        if self.meanwhile and isinstance(message, Request):
            self.meanwhile.start()
            self.meanwhile.join(0.2)  # time enough for whoever need not wait
        self.sent.append(message)


@pytest.fixture
def table() -> Table:
    return Table()


def started(job_id: str = "a") -> Attempt:
    attempt = claimed(job_id)
    attempt.outputs = (Output(NoText(), StopMatcher(())),)
    return attempt


def claimed(job_id: str = "a") -> Attempt:
    return Attempt(Delivery(job_id, "1-1", "normal", {}, 0, 1, 1, f"{job_id}:1", 7, 0, 0, "new"))


def request_of(attempt: Attempt) -> Request:
    return Request(request_id=attempt.request_id, prompt_token_ids=(5,), params=SamplingParams())


def test_an_abort_never_overtakes_its_request(table: Table) -> None:
    attempt = started()
    table.add(attempt)
    table.meanwhile = threading.Thread(target=table.end, args=(attempt, CANCELLED))
    assert table.enter(attempt, request_of(attempt))
    table.meanwhile.join(5)
    assert table.sent == [request_of(attempt), Abort(attempt.request_id)]


@pytest.mark.parametrize("ending", [Ending("succeeded", "stop"), RELEASED_BY_DRAIN], ids=["ended", "released"])
def test_what_has_ended_is_not_sent(table: Table, ending: object) -> None:
    attempt = started()
    table.add(attempt)
    table.end(attempt, ending)  # type: ignore[arg-type]
    assert not table.enter(attempt, request_of(attempt))
    assert table.sent == []


def test_a_cancel_ends_a_started_job_at_once_and_no_other(table: Table) -> None:
    attempts = {job_id: started(job_id) for job_id in "ab"}
    for attempt in attempts.values():
        table.add(attempt)
        table.enter(attempt, request_of(attempt))
    table.cancel("a")
    assert [attempt.ending for attempt in attempts.values()] == [CANCELLED, None]
    assert table.sent[2:] == [Abort(attempts["a"].request_id)]


def test_one_choice_leaves_the_engine_without_the_others(table: Table) -> None:
    attempt = started()
    attempt.outputs *= 3
    table.add(attempt)
    table.enter(attempt, request_of(attempt))
    table.end_choice(attempt, 2)
    assert table.sent[1:] == [Abort(attempt.request_id, 2)]
    assert table.inside() == [attempt]


def test_a_choice_of_what_has_left_the_engine_is_not_aborted(table: Table) -> None:
    attempt = started()
    table.add(attempt)
    table.end_choice(attempt, 0)
    assert table.sent == []


def test_an_attempt_takes_a_slot_for_each_choice_that_goes_on(table: Table) -> None:
    attempt = started()
    attempt.outputs += started().outputs + started().outputs
    table.add(attempt)
    assert table.num_open == 3
    attempt.outputs[1].close("stop")
    assert table.num_open == 2


def test_a_release_that_meets_a_cancel_shows_nothing_that_was_held_back(table: Table) -> None:
    attempt = started()
    table.add(attempt)
    table.end(attempt, RELEASED_BY_DRAIN)
    table.end(attempt, CANCELLED)
    assert attempt.outputs[0].finish_reason is None


def test_a_cancel_of_a_job_that_has_not_started_is_left_to_who_reads_its_log(table: Table) -> None:
    attempt = claimed()
    table.add(attempt)
    table.cancel("a")
    assert (attempt.asked, attempt.ending) == (CANCELLED, None)
    attempt.outputs = started().outputs
    assert not table.enter(attempt, request_of(attempt))


def test_an_end_set_while_the_job_moved_to_another_id_is_still_to_be_written(table: Table) -> None:
    attempt = claimed()
    table.add(attempt)
    table.done(attempt)
    attempt.ending = CANCELLED
    table.add(attempt)
    assert table.wait_for_writing(0) == {attempt}
