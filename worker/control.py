"""Hears on the queue's control channel whose end is asked for, so that a job that is silent now does not outlive its cancel.

Relies on the broker for the subscription. A message may be missed while the connection is gone; what counts is the flag in the
job's hash, which `emit` and `renew` answer with too. Words that are not known are passed over, for later versions to use.
"""

import contextlib
import threading

import redis

from worker import log
from worker.broker import Broker
from worker.inflight import InFlight
from worker.link import Link, LinkDownError

POLL_S = 0.25
"""How soon the thread sees that the worker leaves."""
STOP_S = 1.0

_log = log.get("control")


class Control:
    """The listening thread."""

    def __init__(self, broker: Broker, link: Link, inflight: InFlight) -> None:
        self._broker = broker
        self._link = link
        self._inflight = inflight
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, without waiting for a server that does not answer."""
        self._leave.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

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
        while not self._leave.is_set():
            message = listener.get_message(timeout=POLL_S)
            if message and message["type"] == "message":
                self._act(message["data"])

    def _act(self, said: bytes) -> None:
        word, _, job_id = said.partition(b" ")
        if word == b"cancel":
            self._inflight.cancel(job_id.decode(errors="replace"))
