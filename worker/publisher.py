"""Writes what the attempts have to say: frames to log and channel, then how they end. One thread, one round trip per flush.

Relies on `Attempt.due_at` for when something is due, on a `Sink` to keep it. Leaves what is said to reader and consumer.
The engine never waits for any of this: tokens are kept in the attempt until the log has them.

1. An attempt has the frames of one flush on the way at a time, one for each choice; the server takes them in order.
2. Nothing counts as written until the server says so. After an error the same is sent again; the log answers where it ends.
3. An end is written when the log has every token, and refused by the server otherwise.
4. Nothing is written while our leases may have run out.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from worker import log
from worker.attempt import CANCELLED, Attempt, Ending
from worker.background import Background
from worker.claims import Blame, Delivery, Emission, EmitReply, Finish
from worker.frames import ControlFrame, Frame, TokenFrame, encode_frame, encode_result
from worker.inflight import InFlight
from worker.link import Link, LinkDownError
from worker.metrics import Metrics
from worker.wire import Job

MAX_WAIT_S = 1.0

T = TypeVar("T")

_log = log.get("publisher")


class Sink(Protocol):
    """Who keeps what is said of jobs, and hands those on that came to no end. See `Broker` for what each call means."""

    @property
    def worker_id(self) -> str: ...
    def emit(self, emissions: Sequence[Emission]) -> Sequence[EmitReply]: ...
    def finish(self, finishes: Sequence[Finish]) -> Sequence[str]: ...
    def release(self, deliveries: Sequence[Delivery], blame: Blame = ...) -> None: ...
    def retry(self, retries: Sequence[tuple[Delivery, float]]) -> Sequence[str]: ...
    def acquit(self, deliveries: Sequence[Delivery]) -> None: ...


class Publisher(Background):
    """The publishing thread."""

    def __init__(
        self,
        broker: Sink,
        link: Link,
        inflight: InFlight,
        *,
        metrics: Metrics,
        model: str,
        may_write: Callable[[], bool],
    ) -> None:
        """`may_write` is false while the leases may have run out (self-fencing)."""
        super().__init__("publisher")
        self._broker = broker
        self._link = link
        self._faults = log.Throttle(log.FAULT_LINE_S)
        self._inflight = inflight
        self._metrics = metrics
        self._model = model
        self._may_write = may_write
        self._open: set[Attempt] = set()

    def _wake(self) -> None:
        self._inflight.wake()

    @property
    def num_buffered_tokens(self) -> int:
        """Settled tokens that the log does not have yet."""
        return sum(attempt.num_unlogged for attempt in self._inflight.held())

    def _run(self) -> None:
        wait_s = MAX_WAIT_S
        while not self._leave.is_set():
            self.turned_at = time.monotonic()
            touched = self._inflight.wait_for_writing(wait_s)
            try:
                wait_s = self.flush(touched)
            except LinkDownError:
                self._link.pause()
                wait_s = 0.0
            except Exception:  # noqa: BLE001  whatever it was, the other jobs go on
                self._faults.write(_log.error, "flush_failed", exc_info=True)
                self._link.pause()
                wait_s = 0.0

    def flush(self, touched: set[Attempt]) -> float:
        """Write what is due of these and of those left over; seconds until more is due. `LinkDownError` loses nothing."""
        self._open |= touched
        now = time.monotonic()
        due = [(attempt, at) for attempt in self._open if (at := self._due_at(attempt)) is not None]
        self._open = {attempt for attempt, _ in due}
        ready = [attempt for attempt, at in due if at <= now]
        if not ready:
            return min([MAX_WAIT_S, *(at - now for _, at in due)])
        if not self._may_write():
            time.sleep(0.05)  # renewals run again or tell us what we have lost
            return 0.0
        with self._metrics.publish_flush_duration_seconds.time():
            self._acquit([attempt for attempt in ready if attempt.owes_acquittal and not attempt.ending])
            self._emit(ready)
            self._close([attempt for attempt in ready if attempt.ending and not self._has_frame(attempt)])
        return 0.0

    def _due_at(self, attempt: Attempt) -> float | None:
        return attempt.due_at() if self._inflight.is_held(attempt) else None

    @staticmethod
    def _has_frame(attempt: Attempt) -> bool:
        return bool(attempt.outputs) and not _never_ran(attempt) and (not attempt.is_announced or attempt.num_unlogged > 0)

    def _emit(self, attempts: Iterable[Attempt]) -> None:
        """Send the next frames of each, and take in the answers."""
        frames = [(attempt, self._built(attempt, self._next_frames)) for attempt in attempts if attempt.outputs]
        sent = [(attempt, emission) for attempt, emissions in frames for emission in emissions or ()]
        if not sent:
            return
        replies = self._link.call("emit", lambda: self._broker.emit([emission for _, emission in sent]))
        for (attempt, emission), reply in zip(sent, replies, strict=True):
            self._note_emitted(attempt, emission, reply)

    @staticmethod
    def _next_frames(attempt: Attempt) -> list[Emission]:
        """The start, or a frame of each choice that has something new."""
        n = attempt.num_logged
        emissions: list[Emission] = []
        if not attempt.is_announced:
            start = ControlFrame(attempt.delivery.attempt, "start")
            return [] if _never_ran(attempt) else [_emission(attempt, n, n, start)]
        for choice, first, stop in attempt.unlogged():
            emissions.append(_emission(attempt, n, n + stop - first, _token_frame(attempt, choice, first, stop)))
            n += stop - first
        return emissions

    def _note_emitted(self, attempt: Attempt, emission: Emission, reply: EmitReply) -> None:
        if reply.status == "fenced":
            self._inflight.drop(attempt, "emit")
            return
        if reply.status == "behind":
            attempt.num_logged = reply.n  # the log has more (a reply was lost) or less (a failover was) than we knew
            return
        self._metrics.published_frames.inc()
        if attempt.is_announced:
            attempt.flushed_at = time.monotonic()
        attempt.is_announced = True
        attempt.num_logged = emission.n
        if reply.status == "cancel":
            self._inflight.end(attempt, CANCELLED)

    def _acquit(self, attempts: list[Attempt]) -> None:
        """Tell the server of suspects that have run alone for long enough; the next may come then."""
        if attempts:
            self._link.call("acquit", lambda: self._broker.acquit([attempt.delivery for attempt in attempts]))
            for attempt in attempts:
                attempt.is_acquitted = True
            self._inflight.changed.set()

    def _close(self, attempts: list[Attempt]) -> None:
        """Write the end of attempts whose every token is in the log."""
        groups: defaultdict[tuple[str, Blame], list[tuple[Attempt, Ending]]] = defaultdict(list)
        for attempt in attempts:
            if ending := attempt.ending:
                groups["final" if ending.is_final else ending.state, ending.blame].append((attempt, ending))
        for (kind, blame), group in groups.items():
            if kind == "released":
                self._release(group, blame)
            elif kind == "delayed":
                self._retry(group)
            else:
                self._end(group)

    def _end(self, group: list[tuple[Attempt, Ending]]) -> None:
        finishes = [(attempt, self._built(attempt, self._finish)) for attempt, _ in group]
        ended = [(attempt, finish) for attempt, finish in finishes if finish]
        if ended:
            statuses = self._link.call("finish", lambda: self._broker.finish([finish for _, finish in ended]))
            for (attempt, _), status in zip(ended, statuses, strict=True):
                self._note_finished(attempt, status)

    def _release(self, group: list[tuple[Attempt, Ending]], blame: Blame) -> None:
        deliveries = [attempt.delivery for attempt, _ in group]
        self._link.call("release", lambda: self._broker.release(deliveries, blame))
        for attempt, ending in group:
            self._note_released(attempt, ending)

    def _retry(self, group: list[tuple[Attempt, Ending]]) -> None:
        retries = [(attempt.delivery, ending.delay_s) for attempt, ending in group]
        statuses = self._link.call("retry", lambda: self._broker.retry(retries))
        for (attempt, ending), status in zip(group, statuses, strict=True):
            if status == "fenced":
                self._inflight.drop(attempt, "retry")
            else:
                self._note_released(attempt, ending)

    def _built(self, attempt: Attempt, build: Callable[[Attempt], T]) -> T | None:
        """What `build` makes of it; an attempt that cannot be written is left to its lease and the limit of attempts."""
        try:
            return build(attempt)
        except Exception:  # noqa: BLE001  the flush carries other jobs as well
            self._inflight.drop(attempt, "unwritable")
            return None

    def _finish(self, attempt: Attempt) -> Finish:
        ending = attempt.ending
        assert ending is not None
        assert ending.state != "released"
        assert ending.state != "delayed"
        result = attempt.result(ending, self._broker.worker_id, self._model)
        job = attempt.job or Job()  # a body that could not be read asked for nothing
        end = ControlFrame(attempt.delivery.attempt, "end", ending.state, ending.code or None, result.usage)
        return Finish(
            delivery=attempt.delivery,
            state=ending.state,
            code=ending.code,
            result=encode_result(result),
            end_frame=encode_frame(end),
            expected_n=attempt.num_logged if attempt.outputs else None,
            result_ttl_s=job.result_ttl_s,
            batch_id=job.batch_id,
            error=ending.error,
        )

    def _note_finished(self, attempt: Attempt, status: str) -> None:
        if status == "behind":
            attempt.num_logged = 0  # the next frame asks the log where it ends
            return
        if status == "fenced":
            self._inflight.drop(attempt, "finish")
            return
        if self._inflight.done(attempt) and attempt.ending:
            self._metrics.published_frames.inc()  # the end
            self._metrics.job_ended(attempt, attempt.ending)
            self._trace(attempt, attempt.ending)
            self._log_end(attempt, attempt.ending)

    def _note_released(self, attempt: Attempt, ending: Ending) -> None:
        if not self._inflight.done(attempt):
            return
        self._metrics.jobs_released.labels(ending.why).inc()
        self._metrics.wasted_tokens.labels("aborted").inc(attempt.num_in_vain)
        self._trace(attempt, ending)
        note: dict[str, object] = {"error": ending.error, "pause_s": round(ending.delay_s, 1)} if ending.error else {}
        _log.log(
            attempt.level(),
            "job_released",
            **attempt.about,
            why=ending.why,
            blame=ending.blame,
            tokens=attempt.num_logged,
            held_s=round(time.monotonic() - attempt.taken_at, 3),
            **note,
        )

    def _trace(self, attempt: Attempt, ending: Ending) -> None:
        if self._inflight.tracing:
            self._inflight.tracing.note(attempt, ending.state, ending.code or ending.why, ending.error)

    def _log_end(self, attempt: Attempt, ending: Ending) -> None:
        is_fine = ending.state in ("succeeded", "cancelled")
        level = logging.INFO if is_fine else logging.ERROR if ending.code == "internal" else logging.WARNING
        usage, timings = attempt.usage(), attempt.timings()
        _log.log(
            level,
            "job_ended",
            **attempt.about,
            state=ending.state,
            reason=ending.finish_reason,
            **({"code": ending.code} if ending.code else {}),
            **({"error": ending.error} if ending.error else {}),
            lane=attempt.priority,
            prompt_tokens=usage.prompt_tokens,
            tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            resumed_tokens=usage.resumed_tokens,
            queued_s=round(timings.queued_s, 3),
            ttft_s=None if timings.ttft_s is None else round(timings.ttft_s, 3),
            duration_s=round(timings.e2e_s, 3),
            **log.private(**{f"text_{choice}": output.text for choice, output in enumerate(attempt.outputs)}),
        )


def _never_ran(attempt: Attempt) -> bool:
    """Whether it is given back before its start was told: there is nothing to tell."""
    return not attempt.is_announced and attempt.ending is not None and not attempt.ending.is_final


def _emission(attempt: Attempt, previous_n: int, n: int, frame: Frame) -> Emission:
    job, packed = attempt.delivery, encode_frame(frame)
    return Emission(job.job_id, job.lease, job.attempt, previous_n, n, packed, attempt.is_streamed, job.queue)


def _token_frame(attempt: Attempt, choice: int, start: int, stop: int) -> TokenFrame:
    output = attempt.outputs[choice]
    reason = output.finish_reason  # before the length, which does not change after it
    token_ids, text, offset = output.slice(start, stop)
    is_last = reason is not None and stop == len(output.token_ids)
    logprobs = tuple(output.logprobs[start:stop]) if output.logprobs else ()
    number = attempt.delivery.attempt
    return TokenFrame(number, choice, start, tuple(token_ids), text, offset, reason if is_last else None, logprobs)
