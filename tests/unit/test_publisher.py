"""The publisher against a broker in memory: what goes out when, and what happens when the server does not answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import redis
from structlog.testing import capture_logs

from engine.messages import Abort, TokenLogprobs
from engine.request import Request, SamplingParams
from worker import log, publisher
from worker.attempt import CANCELLED, MISSED_BY_ENGINE, RELEASED_BY_DRAIN, Attempt, Ending
from worker.claims import Delivery, Emission, EmitReply, Finish
from worker.frames import ControlFrame, Frame, TokenFrame, decode_frame, decode_result
from worker.inflight import InFlight
from worker.link import Link, LinkDownError
from worker.metrics import Metrics
from worker.output import Output
from worker.publisher import Publisher
from worker.text import Detokenizer, StopMatcher
from worker.wire import Job

STOPPED = Ending("succeeded", "stop")


class Words(Detokenizer):
    is_pending = False

    def __init__(self) -> None:
        pass

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(f"w{token_id} " for token_id in token_ids)

    def flush(self) -> str:
        return ""


@dataclass
class MemoryBroker:
    """The scripts' answers for jobs that this worker holds; faults can be ordered."""

    worker_id: str = "me"
    logs: dict[str, list[tuple[int, Frame, bool]]] = field(default_factory=dict)
    ends: dict[str, Finish] = field(default_factory=dict)
    released: dict[str, str] = field(default_factory=dict)
    retried: dict[str, float] = field(default_factory=dict)
    acquitted: list[str] = field(default_factory=list)
    fenced: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    num_round_trips: int = 0
    fails_before: int = 0
    loses_replies: int = 0

    def emit(self, emissions: Sequence[Emission]) -> list[EmitReply]:
        self._fault(before=True)
        replies = [self._emit(emission) for emission in emissions]
        self._fault(before=False)
        return replies

    def finish(self, finishes: Sequence[Finish]) -> list[str]:
        self._fault(before=True)
        return [self._finish(finish) for finish in finishes]

    def release(self, deliveries: Sequence[Delivery], blame: str) -> None:
        self._fault(before=True)
        self.released |= {delivery.job_id: blame for delivery in deliveries}

    def retry(self, retries: Sequence[tuple[Delivery, float]]) -> list[str]:
        self._fault(before=True)
        kept = [(delivery.job_id, delay_s) for delivery, delay_s in retries if delivery.job_id not in self.fenced]
        self.retried |= dict(kept)
        return ["fenced" if delivery.job_id in self.fenced else "ok" for delivery, _ in retries]

    def acquit(self, deliveries: Sequence[Delivery]) -> None:
        self._fault(before=True)
        self.acquitted += [delivery.job_id for delivery in deliveries]

    def num_logged(self, job_id: str) -> int:
        return max((n for n, _, _ in self.logs.get(job_id, [])), default=0)

    def token_frames(self, job_id: str) -> list[TokenFrame]:
        return [frame for _, frame, _ in self.logs[job_id] if isinstance(frame, TokenFrame)]

    def _emit(self, emission: Emission) -> EmitReply:
        job_id, logged = emission.job_id, self.num_logged(emission.job_id)
        if job_id in self.fenced or job_id in self.ends or job_id in self.released:
            return EmitReply("fenced", logged)
        frame = decode_frame(emission.frame)
        last = [(n, frame.attempt) for n, frame, _ in self.logs.get(job_id, [])][-1:]
        is_repeat = last == [(emission.n, emission.attempt)]
        if not is_repeat and logged != emission.previous_n:
            return EmitReply("behind", logged)
        if not is_repeat:
            self.logs.setdefault(job_id, []).append((emission.n, frame, emission.publish))
        return EmitReply("cancel" if job_id in self.cancelled else "ok", emission.n)

    def _finish(self, finish: Finish) -> str:
        job_id = finish.delivery.job_id
        if job_id in self.fenced:
            return "fenced"
        if finish.expected_n is not None and finish.expected_n != self.num_logged(job_id):
            return "behind"
        self.ends[job_id] = finish
        return "ok"

    def _fault(self, *, before: bool) -> None:
        if before:
            self.num_round_trips += 1
            if self.fails_before:
                self.fails_before -= 1
                raise redis.ConnectionError("down")
        elif self.loses_replies:
            self.loses_replies -= 1
            raise redis.TimeoutError("no reply")


class Bench:
    """A publisher with a clock that stands still until moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.may_write = True
        self.aborted: list[str] = []
        monkeypatch.setattr(publisher.time, "monotonic", lambda: self.now)
        self.broker = MemoryBroker()
        self.metrics = Metrics()
        self.inflight = InFlight(self.metrics, self._send)
        link = Link("test", self.metrics, log.Throttle())
        self.publisher = Publisher(
            self.broker,  # type: ignore[arg-type]
            link,
            self.inflight,
            metrics=self.metrics,
            model="m",
            may_write=lambda: self.may_write,
        )

    def start(
        self, job_id: str = "a", num_logged: int = 0, number: int = 1, *, is_suspect: bool = False, **fields: object
    ) -> Attempt:
        job = Job(prompt="w1", **fields)  # type: ignore[arg-type]
        lease = f"lease-{job_id}:{number}"
        claim = (job_id, "1-1", "normal", {}, 0, number, number, lease, 7, num_logged, 0, "new")
        delivery = Delivery(*claim, is_suspect=is_suspect)
        outputs = tuple(Output(Words(), StopMatcher(job.stop)) for _ in range(job.num_choices))
        attempt = Attempt(delivery, job, (1,), outputs, num_logged=num_logged)
        self.inflight.add(attempt)
        self.inflight.enter(attempt, Request(request_id=attempt.request_id, prompt_token_ids=(1,), params=SamplingParams()))
        return attempt

    def _send(self, message: Request | Abort) -> None:
        if isinstance(message, Abort):
            self.aborted.append(message.request_id)

    def push(self, attempt: Attempt, *token_ids: int, choice: int = 0, reason: str | None = None) -> None:
        attempt.outputs[choice].push(token_ids, (), reason)
        self.inflight.touch([attempt])

    def flush(self) -> float:
        return self.publisher.flush(self.inflight.wait_for_writing(0))

    def flush_twice(self) -> None:
        """A frame and what comes after it."""
        self.flush()
        self.flush()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_an_attempt_is_announced_before_its_tokens(bench: Bench) -> None:
    bench.push(bench.start(), 5)
    bench.flush_twice()
    assert [frame for _, frame, _ in bench.broker.logs["a"]] == [
        ControlFrame(1, "start"),
        TokenFrame(1, 0, 0, (5,), "w5 ", 0),
    ]


def test_the_first_token_goes_out_at_once_and_the_next_ones_together(bench: Bench) -> None:
    attempt = bench.start()
    bench.flush()
    bench.push(attempt, 5)
    bench.flush()
    bench.push(attempt, 6)
    bench.push(attempt, 7)
    assert bench.flush() == pytest.approx(0.025)
    assert bench.broker.num_logged("a") == 1
    bench.now += 0.025
    bench.flush()
    assert bench.broker.token_frames("a")[1] == TokenFrame(1, 0, 1, (6, 7), "w6 w7 ", 3)


def test_sixteen_tokens_do_not_wait_for_the_clock(bench: Bench) -> None:
    attempt = bench.start()
    bench.flush()
    bench.push(attempt, 5)
    bench.flush()
    bench.push(attempt, *range(16))
    bench.flush()
    assert bench.broker.num_logged("a") == 17


def test_all_jobs_of_a_flush_share_one_round_trip(bench: Bench) -> None:
    for job_id in ("a", "b", "c"):
        bench.push(bench.start(job_id), 5)
    bench.flush()
    assert bench.broker.num_round_trips == 1


def test_a_job_without_a_stream_is_logged_every_64_tokens_and_not_published(bench: Bench) -> None:
    attempt = bench.start(stream=False)
    bench.push(attempt, *range(63))
    bench.flush_twice()
    assert bench.broker.num_logged("a") == 0
    bench.push(attempt, 63)
    bench.flush()
    assert bench.broker.num_logged("a") == 64
    assert not any(is_published for _, _, is_published in bench.broker.logs["a"])


def test_an_end_goes_out_after_every_token_with_the_reason_on_the_last_frame(bench: Bench) -> None:
    attempt = bench.start()
    bench.push(attempt, 5)
    bench.flush_twice()
    bench.push(attempt, 6)
    bench.inflight.end(attempt, STOPPED)
    bench.flush()
    assert bench.broker.token_frames("a")[-1].finish_reason == "stop"
    end = bench.broker.ends["a"]
    assert end.expected_n == 2
    assert decode_result(end.result).choices[0].text == "w5 w6 "
    assert decode_frame(end.end_frame) == ControlFrame(1, "end", "succeeded", None, decode_result(end.result).usage)
    assert bench.inflight.num_held == 0


def test_a_refusal_goes_out_without_a_start(bench: Bench) -> None:
    attempt = Attempt(Delivery("a", "1-1", "normal", {}, 0, 1, 1, "l:1", 7, 0, 0, "new"))
    bench.inflight.add(attempt)
    bench.inflight.end(attempt, Ending("failed", "error", "invalid", "max_tokens: -3: wrong"))
    bench.flush()
    assert "a" not in bench.broker.logs
    assert decode_result(bench.broker.ends["a"].result).error == "max_tokens: -3: wrong"


def test_nothing_is_lost_while_the_server_is_down(bench: Bench) -> None:
    attempt = bench.start()
    bench.push(attempt, 5)
    bench.broker.fails_before = 3
    for _ in range(3):
        with pytest.raises(LinkDownError):
            bench.flush()
        bench.push(attempt, 6)
    bench.inflight.end(attempt, STOPPED)
    bench.flush_twice()
    assert decode_result(bench.broker.ends["a"].result).choices[0].token_ids == (5, 6, 6, 6)


def test_a_lost_reply_neither_repeats_nor_skips_tokens(bench: Bench) -> None:
    attempt = bench.start()
    bench.flush()
    bench.push(attempt, 5)
    bench.broker.loses_replies = 1
    with pytest.raises(LinkDownError):
        bench.flush()
    bench.push(attempt, 6)
    bench.flush()
    bench.now += 1
    bench.flush()
    assert [frame.token_ids for frame in bench.broker.token_frames("a")] == [(5,), (6,)]


def test_a_log_that_lost_its_tail_is_sent_it_again(bench: Bench) -> None:
    attempt = bench.start()
    bench.push(attempt, 5)
    bench.flush_twice()
    bench.push(attempt, 6)
    bench.now += 1
    bench.flush()
    bench.broker.logs["a"].pop()
    bench.inflight.end(attempt, STOPPED)
    for _ in range(4):
        bench.flush()
    assert [frame.token_ids for frame in bench.broker.token_frames("a")] == [(5,), (6,)]
    assert bench.broker.ends["a"].expected_n == 2


def test_a_fenced_job_is_dropped_and_its_tokens_are_counted_as_wasted(bench: Bench) -> None:
    attempt = bench.start()
    bench.push(attempt, 5, 6)
    bench.broker.fenced.add("a")
    bench.flush()
    assert bench.inflight.num_held == 0
    assert bench.aborted == [attempt.request_id]
    assert bench.metrics.jobs_fenced.labels("emit")._value.get() == 1
    assert bench.metrics.wasted_tokens.labels("fenced")._value.get() == 2


def test_a_cancel_answer_ends_the_job_with_what_it_has(bench: Bench) -> None:
    attempt = bench.start()
    bench.push(attempt, 5)
    bench.broker.cancelled.add("a")
    bench.flush_twice()
    result = decode_result(bench.broker.ends["a"].result)
    assert (result.state, result.choices[0].text, result.choices[0].finish_reason) == ("cancelled", "w5 ", "cancelled")
    assert bench.aborted == [attempt.request_id]


def test_a_release_logs_the_tokens_first_and_writes_no_end(bench: Bench) -> None:
    attempt = bench.start()
    bench.flush()
    bench.push(attempt, 5)
    bench.inflight.end(attempt, RELEASED_BY_DRAIN)
    bench.flush()
    assert (bench.broker.num_logged("a"), bench.broker.released, bench.broker.ends) == (1, {"a": "none"}, {})


def test_a_release_tells_how_long_the_job_was_held_whatever_is_done_to_the_clock(bench: Bench) -> None:
    attempt = bench.start()
    attempt.taken_at, attempt.claimed_at = bench.now - 2.0, attempt.claimed_at + 3600
    bench.inflight.end(attempt, RELEASED_BY_DRAIN)
    with capture_logs() as lines:
        bench.flush_twice()
    assert [line["held_s"] for line in lines if line["event"] == "job_released"] == [2.0]


def test_a_release_says_what_each_job_is_blamed_for(bench: Bench) -> None:
    lost = Ending("released", why="engine", blame="batch")
    for job_id, ending in {"a": RELEASED_BY_DRAIN, "b": lost, "c": MISSED_BY_ENGINE}.items():
        bench.inflight.end(bench.start(job_id), ending)
    bench.flush_twice()
    assert bench.broker.released == {"a": "none", "b": "batch", "c": "none"}


def delayed(delay_s: float = 1.5) -> Ending:
    return Ending("delayed", why="fault", error="engine: sampling: no finite logit", delay_s=delay_s)


def test_a_job_that_is_tried_again_later_logs_its_tokens_first_and_writes_no_end(bench: Bench) -> None:
    attempt = bench.start()
    bench.flush()
    bench.push(attempt, 5)
    bench.inflight.end(attempt, delayed())
    bench.flush()
    assert (bench.broker.num_logged("a"), bench.broker.retried, bench.broker.ends) == (1, {"a": 1.5}, {})
    assert bench.inflight.num_held == 0


def test_a_retry_that_another_worker_has_overtaken_is_dropped(bench: Bench) -> None:
    attempt = bench.start()
    bench.flush()
    bench.broker.fenced.add("a")
    bench.inflight.end(attempt, delayed())
    bench.flush()
    assert (bench.broker.retried, bench.inflight.num_held) == ({}, 0)


def test_a_suspect_that_has_been_alone_for_long_enough_is_acquitted_once(bench: Bench) -> None:
    attempt = bench.start(is_suspect=True)
    bench.flush()
    assert (bench.broker.acquitted, attempt.is_suspect) == ([], True)
    attempt.is_alone = False
    bench.inflight.touch([attempt])
    bench.flush()
    bench.push(attempt, 5)
    bench.flush()
    assert (bench.broker.acquitted, attempt.is_suspect) == (["a"], False)


def test_an_acquittal_that_the_server_did_not_hear_is_said_again(bench: Bench) -> None:
    attempt = bench.start(is_suspect=True)
    bench.flush()
    attempt.is_alone = False
    bench.inflight.touch([attempt])
    bench.broker.fails_before = 1
    with pytest.raises(LinkDownError):
        bench.flush()
    assert attempt.is_suspect
    bench.flush()
    assert bench.broker.acquitted == ["a"]


def test_held_back_text_is_not_logged_by_a_release(bench: Bench) -> None:
    attempt = bench.start(stop=("w6 w7",))
    bench.flush()
    bench.push(attempt, 5, 6)
    bench.inflight.end(attempt, RELEASED_BY_DRAIN)
    bench.flush()
    assert bench.broker.num_logged("a") == 1


def test_a_resumed_job_goes_on_where_its_log_ends(bench: Bench) -> None:
    attempt = bench.start(num_logged=2, number=2)
    bench.broker.logs["a"] = [(2, TokenFrame(1, 0, 0, (5, 6), "w5 w6 ", 0), True)]
    attempt.outputs[0].replay([5, 6])
    attempt.order.add(0, 2)
    bench.push(attempt, 7)
    bench.flush_twice()
    assert [frame for _, frame, _ in bench.broker.logs["a"][1:]] == [
        ControlFrame(2, "start"),
        TokenFrame(2, 0, 2, (7,), "w7 ", 6),
    ]


def test_nothing_is_written_while_the_leases_may_have_run_out(bench: Bench) -> None:
    attempt = bench.start()
    bench.push(attempt, 5)
    bench.may_write = False
    bench.flush()
    assert bench.broker.num_round_trips == 0
    bench.may_write = True
    bench.flush_twice()
    assert bench.broker.num_logged("a") == 1


def test_an_ending_is_set_once(bench: Bench) -> None:
    attempt = bench.start()
    assert bench.inflight.end(attempt, STOPPED)
    assert not bench.inflight.end(attempt, CANCELLED)
    bench.flush_twice()
    assert bench.broker.ends["a"].state == "succeeded"


# ---- several choices


def of_choice(bench: Bench, choice: int, job_id: str = "a") -> list[TokenFrame]:
    return [frame for frame in bench.broker.token_frames(job_id) if frame.choice == choice]


def test_choices_share_a_flush_and_the_count_of_the_log(bench: Bench) -> None:
    attempt = bench.start(n=3)
    bench.flush()
    bench.push(attempt, 5, 6, choice=0)
    bench.push(attempt, 7, choice=2)
    before = bench.broker.num_round_trips
    bench.flush()
    assert bench.broker.num_round_trips == before + 1
    assert [(n, frame) for n, frame, _ in bench.broker.logs["a"][1:]] == [
        (2, TokenFrame(1, 0, 0, (5, 6), "w5 w6 ", 0)),
        (3, TokenFrame(1, 2, 0, (7,), "w7 ", 0)),
    ]


def test_a_choice_that_ends_says_so_in_its_last_frame_while_the_others_go_on(bench: Bench) -> None:
    attempt = bench.start(n=2)
    bench.flush()
    bench.push(attempt, 5, choice=0)
    bench.push(attempt, 6, choice=1, reason="stop")
    bench.flush()
    assert [frame.finish_reason for frame in bench.broker.token_frames("a")] == [None, "stop"]
    assert not bench.broker.ends


@pytest.mark.parametrize("num_kept", [0, 1, 2], ids=lambda num: f"{num} frames arrived")
def test_a_flush_of_several_choices_that_is_cut_short_is_neither_repeated_nor_lost(bench: Bench, num_kept: int) -> None:
    attempt = bench.start(n=2)
    bench.flush()
    for choice in (0, 1):
        bench.push(attempt, 5, choice=choice)
    bench.broker.loses_replies = 1
    with pytest.raises(LinkDownError):
        bench.flush()
    del bench.broker.logs["a"][1 + num_kept :]
    for choice in (1, 0):
        bench.push(attempt, 6, choice=choice, reason="length")
    bench.inflight.end(attempt, STOPPED)
    for _ in range(5):
        bench.flush()
    for choice in (0, 1):
        assert [i for frame in of_choice(bench, choice) for i in frame.token_ids] == [5, 6]
        assert of_choice(bench, choice)[-1].finish_reason == "length"
    assert bench.broker.ends["a"].expected_n == 4


def test_a_log_of_several_choices_that_lost_its_tail_is_sent_it_again(bench: Bench) -> None:
    attempt = bench.start(n=2)
    bench.flush()
    for token_id in (5, 6, 7):
        for choice in (0, 1):
            bench.push(attempt, token_id, choice=choice)
        bench.now += 1
        bench.flush()
    del bench.broker.logs["a"][3:]
    bench.inflight.end(attempt, CANCELLED)
    for _ in range(6):
        bench.flush()
    for choice in (0, 1):
        frames = of_choice(bench, choice)
        assert [i for frame in frames for i in frame.token_ids] == [5, 6, 7]
        assert [frame.index for frame in frames] == [sum(len(f.token_ids) for f in frames[:k]) for k in range(len(frames))]
    assert bench.broker.ends["a"].expected_n == 6


def test_the_choices_of_a_cancelled_job_keep_their_own_ends(bench: Bench) -> None:
    attempt = bench.start(n=2)
    bench.push(attempt, 5, choice=0, reason="stop")
    bench.push(attempt, 6, choice=1)
    bench.inflight.end(attempt, CANCELLED)
    for _ in range(3):
        bench.flush()
    result = decode_result(bench.broker.ends["a"].result)
    assert [(choice.token_ids, choice.finish_reason) for choice in result.choices] == [((5,), "stop"), ((6,), "cancelled")]
    assert result.usage.completion_tokens == 2


def test_log_probabilities_go_with_their_tokens(bench: Bench) -> None:
    attempt = bench.start(logprobs=1)
    told = (TokenLogprobs(-0.5, ((5, -0.5),)), TokenLogprobs(-1.0, ((6, -1.0),)))
    attempt.outputs[0].push((5, 6), told, "length")
    bench.inflight.end(attempt, STOPPED)
    for _ in range(3):
        bench.flush()
    assert [frame.logprobs for frame in bench.broker.token_frames("a")] == [told]
    assert decode_result(bench.broker.ends["a"].result).choices[0].logprobs == told


def test_a_beam_search_has_no_frames_and_all_its_choices_in_the_result(bench: Bench) -> None:
    attempt = bench.start(beam_width=2)
    for choice in (0, 1):
        bench.push(attempt, 5, 6 + choice, choice=choice, reason="length")
        attempt.outputs[choice].score = -0.5 - choice
    bench.flush_twice()
    bench.inflight.end(attempt, STOPPED)
    bench.flush_twice()
    assert bench.broker.token_frames("a") == []
    assert bench.broker.ends["a"].expected_n == 0
    result = decode_result(bench.broker.ends["a"].result)
    assert [(choice.token_ids, choice.score) for choice in result.choices] == [((5, 6), -0.5), ((5, 7), -1.5)]
