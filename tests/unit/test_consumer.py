"""From a claim to the engine or to an ending, with a broker in memory and an engine that dies at the worst moment."""

from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from engine.config import EngineConfig
from engine.messages import Abort
from engine.request import Request
from tests.support import fake_engine
from worker import consumer, log
from worker.attempt import CANCELLED, MISSED_BY_ENGINE, RELEASED_BY_DRAIN, Attempt, Ending
from worker.claims import Delivery
from worker.consumer import Consumer
from worker.frames import TokenFrame, encode_frame
from worker.inflight import InFlight
from worker.link import Link
from worker.metrics import Metrics
from worker.reader import Reader, Serving
from worker.settings import Settings
from worker.text import Tokenizer
from worker.wire import Job

LOGGED = (5, 6, 7)


class MemoryBroker:
    """Hands out what is put into it, and the same log for every job."""

    def __init__(self) -> None:
        self.queued: list[Delivery] = []
        self.asked_for: list[int] = []
        self.suspects_wanted: list[bool] = []
        self.waited_s: list[float] = []
        self.is_paused = False
        self.next_due_s: float | None = None

    def ensure_group(self) -> None:
        pass

    @property
    def num_waits(self) -> int:
        return len(self.waited_s)

    def reclaim(self, in_hand: list[Delivery]) -> int:
        return 0

    def fetch(self, free: int, *, aging: int, may_take_suspect: bool) -> list[Delivery]:
        self.asked_for.append(free)
        self.suspects_wanted.append(may_take_suspect)
        taken, self.queued = self.queued[:free], self.queued[free:]
        return taken

    def wait_for_entry(self, block_s: float) -> None:
        self.waited_s.append(block_s)

    def log_of(self, delivery: Delivery) -> list[bytes]:
        return [encode_frame(TokenFrame(1, 0, 0, LOGGED, "w5 w6 w7", 0))]


class Interrupted(Tokenizer):
    """Something happens while a prompt is being encoded, once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.happens: Callable[[], None] = lambda: None

    def encode_prompt(self, job: Job, max_tokens: int | None = None) -> list[int]:
        happens, self.happens = self.happens, lambda: None
        happens()
        return super().encode_prompt(job, max_tokens)


class Bench:
    """A consumer whose engine is a list of messages."""

    def __init__(self, directory: Path) -> None:
        self.settings = Settings(engine=EngineConfig(model="m"), tenant_weights={"acme": 2.0})
        self.sent: list[Request | Abort] = []
        self.broker = MemoryBroker()
        self.metrics = metrics = Metrics()
        self.inflight = InFlight(metrics, self.sent.append)
        self.tokenizer = Interrupted(directory)
        self.reader = Reader(self.inflight, metrics, "m", lambda: None)
        self.start_engine()
        self.consumer = Consumer(
            self.broker,  # type: ignore[arg-type]
            Link("test", metrics, log.Throttle()),
            self.inflight,
            engines=self.reader,
            metrics=metrics,
            settings=self.settings,
        )

    def start_engine(self) -> None:
        self.reader.serving = Serving(fake_engine.ready(self.settings.engine), self.tokenizer)

    def restart_engine(self) -> None:
        self.reader.on_down()
        self.start_engine()

    def add(
        self,
        job_id: str,
        *,
        ending: str = "",
        num_logged: int = 0,
        number: int = 1,
        is_suspect: bool = False,
        num_crashes: int = 0,
        **body: object,
    ) -> None:
        fields = {b"m": msgpack.packb({"prompt": "w5 w6"} | body)}
        lease = f"{job_id}:{number}"
        self.broker.queued.append(
            Delivery(
                job_id,
                "1-1",
                "normal",
                fields,
                0,
                number,
                number,
                lease,
                7,
                num_logged,
                0,
                "new",
                ending,  # type: ignore[arg-type]
                is_suspect=is_suspect,
                num_crashes=num_crashes,
            )
        )

    def run(self, turns: int) -> dict[str, Attempt]:
        """What is held after so many turns of the loop, by job."""
        left = iter(range(turns))
        self.consumer.run(lambda: next(left, None) is not None)
        return {attempt.delivery.job_id: attempt for attempt in self.inflight.held()}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(fake_engine.save_model(tmp_path))


def test_what_was_claimed_for_an_engine_that_died_is_not_left_inside_the_next_one(bench: Bench) -> None:
    for job_id in "abc":
        bench.add(job_id)
    bench.tokenizer.happens = bench.restart_engine
    held = bench.run(3)
    assert held["a"].ending == MISSED_BY_ENGINE
    assert [held[job_id].ending for job_id in "bc"] == [None, None]
    assert bench.inflight.inside() == [held["b"], held["c"]]
    inside = {message.request_id for message in bench.sent if isinstance(message, Request)}
    assert inside - {message.request_id for message in bench.sent if isinstance(message, Abort)} == {
        held["b"].request_id,
        held["c"].request_id,
    }


def test_a_loop_that_starts_many_jobs_comes_around_with_each(bench: Bench) -> None:
    for job_id in "ab":
        bench.add(job_id)
    bench.tokenizer.happens = lambda: setattr(bench.consumer, "turned_at", 0.0)
    bench.run(2)
    assert bench.consumer.turned_at > 0


def test_a_job_that_was_inside_a_dead_engine_is_a_suspect(bench: Bench) -> None:
    bench.add("a")
    ending = bench.run(2)["a"].ending
    assert ending is None
    bench.restart_engine()
    ending = bench.run(0)["a"].ending
    assert ending is not None
    assert (ending.state, ending.blame) == ("released", "batch")


def test_no_suspect_is_asked_for_while_one_is_in_hand(bench: Bench) -> None:
    bench.add("a", is_suspect=True)
    attempt = bench.run(2)["a"]
    bench.run(1)
    attempt.is_acquitted = True
    bench.run(1)
    assert bench.broker.suspects_wanted == [True, False, True]


@pytest.mark.parametrize(("is_suspect", "steps"), [(True, 8), (False, 0)])
def test_a_suspect_is_to_run_alone_for_eight_steps(bench: Bench, is_suspect: bool, steps: int) -> None:
    bench.add("a", is_suspect=is_suspect)
    bench.run(2)
    assert [message.isolated_steps for message in bench.sent if isinstance(message, Request)] == [steps]


def test_a_job_that_crashed_twice_while_alone_is_not_tried_again(bench: Bench) -> None:
    bench.add("a", is_suspect=True, num_crashes=2, number=3)
    ending = bench.run(2)["a"].ending
    assert ending is not None
    assert (ending.state, ending.code) == ("dead", "dead_letter")
    assert bench.sent == []


def test_a_paused_queue_is_not_waited_at_its_doorbell(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "WAIT_S", 0.001)
    bench.broker.is_paused = True
    bench.run(2)
    assert bench.broker.num_waits == 0
    bench.broker.is_paused = False
    bench.run(1)
    assert bench.broker.num_waits == 1


def test_the_wait_for_an_entry_ends_when_a_delayed_job_is_due(bench: Bench) -> None:
    bench.broker.next_due_s = 0.125
    bench.run(1)
    assert bench.broker.waited_s == [0.125]


def test_a_log_that_may_be_complete_is_the_engine_s_to_judge(bench: Bench) -> None:
    bench.add("a", num_logged=len(LOGGED), number=2, max_tokens=len(LOGGED))
    bench.run(2)
    assert [request.output_token_ids for request in bench.sent if isinstance(request, Request)] == [LOGGED]


def test_a_log_that_holds_a_stop_string_ends_without_the_engine(bench: Bench) -> None:
    bench.add("a", num_logged=len(LOGGED), number=2, stop="w6 w7")
    assert bench.run(2)["a"].ending == Ending("succeeded", "stop")
    assert bench.sent == []


@pytest.mark.parametrize("body", [{}, {"max_tokens": -1}, {"model": "another"}, {"max_attempts": 1}], ids=str)
def test_what_was_asked_for_in_the_queue_is_the_end_whatever_else_is_wrong(bench: Bench, body: dict[str, object]) -> None:
    bench.add("a", ending="cancelled", number=2, **body)
    assert bench.run(2)["a"].ending == CANCELLED
    assert bench.sent == []


def test_a_cancel_while_a_job_is_being_started_keeps_the_text_of_its_log(bench: Bench) -> None:
    bench.add("a", num_logged=len(LOGGED), number=2)
    bench.tokenizer.happens = lambda: bench.inflight.cancel("a")
    attempt = bench.run(2)["a"]
    assert (attempt.ending, tuple(attempt.outputs[0].token_ids), bench.sent) == (CANCELLED, LOGGED, [])


def test_a_job_of_many_choices_that_was_taken_ahead_leaves_no_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "WAIT_S", 0.01)
    monkeypatch.setattr(consumer, "AHEAD_WAIT_S", 0.01)
    for job_id in "abc":
        bench.add(job_id, n=8)
        bench.run(3)
    assert set(bench.run(1)) == {"a", "b"}
    assert min(bench.broker.asked_for) > 0


def test_more_choices_than_slots_are_refused(bench: Bench) -> None:
    bench.add("a", n=9)
    ending = bench.run(2)["a"].ending
    assert ending
    assert (ending.code, bench.sent) == ("invalid", [])


def test_a_tenant_s_jobs_have_its_number_and_weight(bench: Bench) -> None:
    for job_id, tenant in {"a": "acme", "b": "other", "c": "acme", "d": None}.items():
        bench.add(job_id, tenant=tenant)
    bench.run(2)
    requests = [message for message in bench.sent if isinstance(message, Request)]
    assert [(request.tenant, request.weight) for request in requests] == [(1, 2.0), (2, 1.0), (1, 2.0), (0, 1.0)]


@pytest.mark.parametrize("more", [{}, {"max_tokens": -3}], ids=["a job", "a refusal"])
def test_what_is_given_back_before_its_start_tells_its_trace(bench: Bench, more: dict[str, object]) -> None:
    bench.add("a", traceparent=f"00-{'a' * 32}-{'b' * 16}-01", **more)
    bench.consumer._claim(1)
    bench.consumer.give_back_claimed()
    [attempt] = bench.inflight.held()
    assert (attempt.ending, attempt.trace_id) == (RELEASED_BY_DRAIN, "a" * 32)
