"""Hears on the queue's control channel whose end is asked for, so that a job that is silent now does not outlive its cancel,
and answers those who look.

Relies on the broker for the subscription and the answer. A message may be missed while the connection is gone; what counts is
the flag in the job's hash, which `emit` and `renew` answer with too. Words that are not known are passed over, for later
versions to use.

A look is answered on a channel that all who look share, `MAX_ANSWERS_PER_S` times a second at most: those who ask meanwhile get
the next one. An answer that fails holds up no cancel.
"""

import contextlib
import time
from collections.abc import Callable

import redis

from worker import log
from worker.background import Background
from worker.broker import Broker
from worker.connection import hear
from worker.inflight import InFlight
from worker.link import Link, LinkDownError

POLL_S = 0.25
"""How soon the thread sees that the worker leaves."""
SILENCE_S = 5.0
"""A channel that has been silent for so long is asked whether anybody is there, and given up after as long again."""
MAX_ANSWERS_PER_S = 10

_log = log.get("control")


class Control(Background):
    """The listening thread."""

    def __init__(self, broker: Broker, link: Link, inflight: InFlight, snapshot: Callable[[], bytes]) -> None:
        """`snapshot` is what a look is answered with."""
        super().__init__("control")
        self._broker = broker
        self._link = link
        self._faults = log.Throttle(log.FAULT_LINE_S)
        self._inflight = inflight
        self._snapshot = snapshot
        self._is_looked_at = False
        self._answer_at = 0.0

    def _run(self) -> None:
        while not self._leave.is_set():
            try:
                with contextlib.closing(self._link.call("listen", self._broker.listen)) as listener:
                    self._hear(listener)
            except (LinkDownError, redis.RedisError):
                self._link.pause()
            except Exception:  # noqa: BLE001  without this thread cancels are slow
                self._faults.write(_log.error, "listening_failed", exc_info=True)
                self._link.pause()

    def _hear(self, listener: redis.client.PubSub) -> None:
        heard_at, is_asked = time.monotonic(), False
        while not self._leave.is_set():
            heard, silent_s = hear(listener, self._patience_s()), time.monotonic() - heard_at
            if heard is not None:
                heard_at, is_asked = time.monotonic(), False
                if heard[0] == "message":
                    self._act(heard[1])
            elif silent_s > 2 * SILENCE_S:
                raise redis.TimeoutError("no answer to a ping")
            elif silent_s > SILENCE_S and not is_asked:
                listener.ping()
                is_asked = True
            if self._is_looked_at and time.monotonic() >= self._answer_at:
                self._answer()

    def _act(self, said: bytes) -> None:
        word, _, job_id = said.partition(b" ")
        if word == b"cancel":
            self._inflight.cancel(job_id.decode(errors="replace"))
        elif word == b"look":
            self._is_looked_at = True

    def _patience_s(self) -> float:
        if not self._is_looked_at:
            return POLL_S
        return min(POLL_S, max(0.001, self._answer_at - time.monotonic()))

    def _answer(self) -> None:
        self._is_looked_at = False
        self._answer_at = time.monotonic() + 1 / MAX_ANSWERS_PER_S
        try:
            self._broker.show(self._snapshot())
        except redis.RedisError as error:  # not by the link: a worker whose server refuses this serves all the same
            _log.debug("look_unanswered", error=str(error)[:200])
        except Exception:  # noqa: BLE001  a fault in what is shown must not cost cancels
            self._faults.write(_log.error, "look_failed", exc_info=True)
