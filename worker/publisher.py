"""Writes what the attempts have to say: frames to log and channel, then how they end. One thread, one round trip per flush.

Relies on `Attempt.due_at` for when something is due, on `broker` for the scripts. Leaves what is said to reader and consumer.
The engine never waits for any of this: tokens are kept in the attempt until the log has them.

1. An attempt has the frames of one flush on the way at a time, one for each choice; the server takes them in order.
2. Nothing counts as written until the server says so. After an error the same is sent again; the log answers where it ends.
3. An end is written when the log has every token, and refused by the server otherwise.
4. Nothing is written while our leases may have run out.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from worker import log
from worker.attempt import CANCELLED, Attempt, Ending
from worker.broker import Broker, Emission, EmitReply, Finish
from worker.frames import ControlFrame, Frame, TokenFrame, encode_frame, encode_result
from worker.inflight import InFlight
from worker.link import Link, LinkDownError
from worker.metrics import Metrics
from worker.wire import Job

MAX_WAIT_S = 1.0
STOP_S = 1.0

T = TypeVar("T")

_log = log.get("publisher")


class Publisher:
    """The publishing thread."""

    def __init__(
        self, broker: Broker, link: Link, inflight: InFlight, *, metrics: Metrics, model: str, may_write: Callable[[], bool]
    ) -> None:
        """`may_write` is false while the leases may have run out (self-fencing)."""
        self._broker = broker
        self._link = link
        self._inflight = inflight
        self._metrics = metrics
        self._model = model
        self._may_write = may_write
        self._open: set[Attempt] = set()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the flush it is in, without waiting for a server that does not answer."""
        self._leave.set()
        self._inflight.wake()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    @property
    def num_buffered_tokens(self) -> int:
        """Settled tokens that the log does not have yet."""
        return sum(attempt.num_unlogged for attempt in self._inflight.held())

    def _run(self) -> None:
        wait_s = MAX_WAIT_S
        while not self._leave.is_set():
            touched = self._inflight.wait_for_writing(wait_s)
            try:
                wait_s = self.flush(touched)
            except LinkDownError:
                self._link.pause()
                wait_s = 0.0
            except Exception:  # noqa: BLE001  whatever it was, the other jobs go on
                _log.error("flush_failed", exc_info=True)
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

    def _close(self, attempts: list[Attempt]) -> None:
        """Write the end of attempts whose every token is in the log."""
        released = [attempt for attempt in attempts if attempt.ending and attempt.ending.state == "released"]
        finishes = [(attempt, self._built(attempt, self._finish)) for attempt in attempts if attempt not in released]
        ended = [(attempt, finish) for attempt, finish in finishes if finish]
        if ended:
            statuses = self._link.call("finish", lambda: self._broker.finish([finish for _, finish in ended]))
            for (attempt, _), status in zip(ended, statuses, strict=True):
                self._note_finished(attempt, status)
        for counted in (False, True):
            self._release([attempt for attempt in released if attempt.ending and attempt.ending.is_counted == counted], counted)

    def _release(self, attempts: list[Attempt], counted: bool) -> None:
        if attempts:
            deliveries = [attempt.delivery for attempt in attempts]
            self._link.call("release", lambda: self._broker.release(deliveries, counted=counted))
            for attempt in attempts:
                self._note_released(attempt)

    def _built(self, attempt: Attempt, build: Callable[[Attempt], T]) -> T | None:
        """What `build` makes of it; an attempt that cannot be written is left to its lease and the limit of attempts."""
        try:
            return build(attempt)
        except Exception:  # noqa: BLE001  the flush carries other jobs as well
            _log.error("job_unwritable", job=attempt.delivery.job_id, exc_info=True)
            self._inflight.drop(attempt, "unwritable")
            return None

    def _finish(self, attempt: Attempt) -> Finish:
        ending = attempt.ending
        assert ending is not None
        assert ending.state != "released"
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
            self._metrics.job_ended(attempt, attempt.ending)
            self._log_end(attempt, attempt.ending)

    def _note_released(self, attempt: Attempt) -> None:
        assert attempt.ending is not None
        if self._inflight.done(attempt):
            self._metrics.jobs_released.labels(attempt.ending.why).inc()
            self._metrics.wasted_tokens.labels("aborted").inc(attempt.num_in_vain)
            _log.info("job_released", job=attempt.delivery.job_id, why=attempt.ending.why, tokens=attempt.num_logged)

    def _log_end(self, attempt: Attempt, ending: Ending) -> None:
        write = _log.info if ending.state == "succeeded" else _log.warning
        note = {"error": ending.error} if ending.error else {}
        write(
            "job_ended",
            job=attempt.delivery.job_id,
            state=ending.state,
            reason=ending.finish_reason,
            tokens=attempt.num_tokens,
            **note,
        )


def _never_ran(attempt: Attempt) -> bool:
    """Whether it is given back before its start was told: there is nothing to tell."""
    return not attempt.is_announced and attempt.ending is not None and attempt.ending.state == "released"


def _emission(attempt: Attempt, previous_n: int, n: int, frame: Frame) -> Emission:
    delivery = attempt.delivery
    return Emission(delivery.job_id, delivery.lease, delivery.attempt, previous_n, n, encode_frame(frame), attempt.is_streamed)


def _token_frame(attempt: Attempt, choice: int, start: int, stop: int) -> TokenFrame:
    output = attempt.outputs[choice]
    reason = output.finish_reason  # before the length, which does not change after it
    token_ids, text, offset = output.slice(start, stop)
    is_last = reason is not None and stop == len(output.token_ids)
    logprobs = tuple(output.logprobs[start:stop]) if output.logprobs else ()
    number = attempt.delivery.attempt
    return TokenFrame(number, choice, start, tuple(token_ids), text, offset, reason if is_last else None, logprobs)
