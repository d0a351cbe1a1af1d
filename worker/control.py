"""Hears on the queue's control channel whose end is asked for, so that a job that is silent now does not outlive its cancel.

Relies on the broker for the subscription. A message may be missed while the connection is gone; what counts is the flag in the
job's hash, which `emit` and `renew` answer with too. Words that are not known are passed over, for later versions to use.
"""

import contextlib
import time

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

_log = log.get("control")


class Control(Background):
    """The listening thread."""

    def __init__(self, broker: Broker, link: Link, inflight: InFlight) -> None:
        super().__init__("control")
        self._broker = broker
        self._link = link
        self._inflight = inflight

    def _run(self) -> None:
        while not self._leave.is_set():
            try:
                with contextlib.closing(self._link.call("listen", self._broker.listen)) as listener:
                    self._hear(listener)
            except (LinkDownError, redis.RedisError):
                self._link.pause()
            except Exception:  # noqa: BLE001  without this thread cancels are slow
                _log.error("listening_failed", exc_info=True)
                self._link.pause()

    def _hear(self, listener: redis.client.PubSub) -> None:
        heard_at, is_asked = time.monotonic(), False
        while not self._leave.is_set():
            heard, silent_s = hear(listener, POLL_S), time.monotonic() - heard_at
            if heard is not None:
                heard_at, is_asked = time.monotonic(), False
                if heard[0] == "message":
                    self._act(heard[1])
            elif silent_s > 2 * SILENCE_S:
                raise redis.TimeoutError("no answer to a ping")
            elif silent_s > SILENCE_S and not is_asked:
                listener.ping()
                is_asked = True

    def _act(self, said: bytes) -> None:
        word, _, job_id = said.partition(b" ")
        if word == b"cancel":
            self._inflight.cancel(job_id.decode(errors="replace"))
