"""A batch file as a queue: what a line meets is what a job meets on a server."""

from collections.abc import Iterator

import msgpack
import pytest

from worker.batch.file_broker import FileBroker
from worker.batch.lines import BatchLine
from worker.claims import Blame, Delivery, Emission, Finish
from worker.errors import InvalidOption
from worker.frames import Result, encode_result
from worker.verdict import DEAD_REMEDY


def line(number: int, **body: object) -> BatchLine:
    metadata = {"custom_id": f"c{number}", "endpoint": "/v1/completions", "line": number}
    return BatchLine(number, f"c{number}", "/v1/completions", {"prompt": "w5", "stream": False, "metadata": metadata} | body)


def broker_of(num_lines: int, window: int | None = None) -> FileBroker:
    return FileBroker(map(line, range(1, num_lines + 1)), "b", "local", window)


def finish(delivery: Delivery, expected_n: int | None = None) -> Finish:
    result = Result(id=delivery.job_id, state="succeeded")
    return Finish(delivery, "succeeded", "", encode_result(result), b"", expected_n=expected_n)


def ids(deliveries: list[Delivery]) -> list[str]:
    return [delivery.job_id for delivery in deliveries]


def test_lines_become_jobs_in_the_order_of_the_file_and_no_more_of_them_than_there_are_slots() -> None:
    broker = broker_of(5)
    assert ids(broker.fetch(2)) == ["b-1", "b-2"]
    assert ids(broker.fetch(9)) == ["b-3", "b-4", "b-5"]
    assert broker.fetch(9) == []


def test_a_claim_carries_the_lines_body_and_the_same_seed_in_every_run() -> None:
    [first], [again] = broker_of(1).fetch(1), broker_of(1).fetch(1)
    assert first.fields is not None
    assert msgpack.unpackb(first.fields[b"m"]) == line(1).body
    assert (first.seed, first.attempt, first.counted_attempts, first.source) == (again.seed, 1, 1, "new")
    assert first.seed < 2**60


def test_a_result_is_taken_once_with_the_lines_metadata_and_a_repeated_end_changes_nothing() -> None:
    broker = broker_of(1)
    [delivery] = broker.fetch(1)
    assert broker.finish([finish(delivery)] * 2) == ["ok", "ok"]
    assert not broker.is_done, "its result was not taken yet"
    assert broker.ended.get_nowait().metadata == line(1).body["metadata"]
    assert broker.fetch(1) == []
    assert broker.is_done


def test_a_log_goes_on_where_it_ends_and_an_end_waits_for_it() -> None:
    broker = broker_of(1)
    [delivery] = broker.fetch(1)
    emissions = [Emission("b-1", delivery.lease, 1, previous, n, b"%d" % n) for previous, n in ((0, 0), (0, 4), (8, 9))]
    assert [(reply.status, reply.n) for reply in broker.emit(emissions)] == [("ok", 0), ("ok", 4), ("behind", 4)]
    assert broker.finish([finish(delivery, expected_n=9)]) == ["behind"]
    broker.release([delivery], "none")
    assert [reply.status for reply in broker.emit(emissions[:1])] == ["fenced"]
    [again] = broker.fetch(1)
    assert (again.num_logged, again.attempt, broker.log_of(again)) == (4, 2, [b"0", b"4"])


@pytest.mark.parametrize(
    ("blame", "is_suspect", "counted", "crashes"),
    [("none", False, 1, 0), ("bystander", True, 1, 0), ("batch", True, 2, 0), ("solo", True, 2, 1)],
)
def test_a_line_that_is_given_back_is_charged_as_a_server_charges_it(
    blame: Blame, is_suspect: bool, counted: int, crashes: int
) -> None:
    broker = broker_of(1)
    broker.release(broker.fetch(1) * 2, blame)  # a repeat charges nobody
    [again] = broker.fetch(1)
    assert (again.is_suspect, again.counted_attempts, again.num_crashes, again.source) == (
        is_suspect,
        counted,
        crashes,
        "released",
    )


def test_suspects_come_one_at_a_time_before_all_else_and_not_while_another_runs() -> None:
    broker = broker_of(4)
    first, second, third = broker.fetch(3)
    broker.release([third], "none")
    broker.release([first, second], "batch")
    assert ids(broker.fetch(1, may_take_suspect=False)) == ["b-3"]
    [suspect, other] = broker.fetch(3)
    assert (suspect.job_id, suspect.is_suspect, other.job_id) == ("b-1", True, "b-4")
    broker.acquit([suspect])
    broker.release([suspect], "none")
    assert [delivery.is_suspect for delivery in broker.fetch(9, may_take_suspect=False)] == [False]


def test_a_line_that_is_tried_again_later_counts_its_attempt_and_is_due_then() -> None:
    broker = broker_of(1)
    assert broker.retry([(broker.fetch(1)[0], 3600.0)]) == ["ok"]
    assert broker.fetch(1) == []
    assert 3590 < (broker.next_due_s or 0) <= 3600
    assert not broker.is_done
    soon = broker_of(1)
    soon.retry([(soon.fetch(1)[0], 0.0)])
    [again] = soon.fetch(1)
    assert (again.counted_attempts, soon.next_due_s) == (2, None)


def test_what_the_worker_has_dropped_is_found_and_what_it_holds_is_not() -> None:
    broker = broker_of(2)
    held, dropped = broker.fetch(2)
    assert broker.reclaim([held]) == 1
    assert ids(broker.fetch(2)) == [dropped.job_id]


def test_with_a_window_no_line_is_read_far_ahead_of_the_first_that_has_not_ended() -> None:
    broker = broker_of(9, window=3)
    first, second, _ = broker.fetch(9)
    broker.finish([finish(second)])
    assert broker.fetch(9) == []
    broker.finish([finish(first)])
    assert ids(broker.fetch(9)) == ["b-4", "b-5"]


def test_a_line_whose_body_cannot_be_sent_ends_as_invalid_and_the_next_one_goes_on() -> None:
    broker = FileBroker(iter([line(1, x_own="\ud800"), line(2)]), "b", "local")
    assert ids(broker.fetch(1)) == ["b-2"]
    refused = broker.ended.get_nowait()
    assert (refused.id, refused.state, refused.code, refused.metadata["line"]) == ("b-1", "failed", "invalid", 1)


def test_a_file_that_cannot_be_read_to_its_end_ends_the_run_in_one_line() -> None:
    def lines() -> Iterator[BatchLine]:
        yield line(1)
        raise OSError("gone")

    broker = FileBroker(lines(), "b", "local")
    broker.fetch(1)
    with pytest.raises(InvalidOption, match=r"^--input: cannot be read any more: OSError: gone; .*--resume$"):
        broker.fetch(1)


def test_the_error_of_a_line_that_is_given_up_names_no_command_of_a_server() -> None:
    broker = broker_of(1)
    [delivery] = broker.fetch(1)
    result = Result(id=delivery.job_id, state="dead", code="dead_letter", error=f"crashes: 2 times{DEAD_REMEDY}")
    broker.finish([Finish(delivery, "dead", "dead_letter", encode_result(result), b"")])
    assert broker.ended.get_nowait().error == "crashes: 2 times"


def test_who_waits_is_told_when_a_line_has_ended() -> None:
    broker = broker_of(2)
    first, second = broker.fetch(2)
    for happen in (
        lambda: broker.finish([finish(first)]),
        lambda: broker.release([second]),
        lambda: broker.retry([(second, 0)]),
    ):
        happen()
        broker.wait_for_entry(60.0)  # the test's own limit would end it
