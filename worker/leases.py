"""Keeps what is ours: renewals and heartbeats from a thread and a connection of their own, and the queue's gauges.

Relies on `InFlight` for what is held and on the broker for the scripts. Leaves taking jobs, also reclaimed ones, to `consumer`.

1. A worker that may have lost its leases writes nothing (`is_current`); the scripts would refuse it, this refuses it earlier.
2. A worker whose engine stands still lets its leases run out, so that its jobs go on elsewhere.
"""

import time
from collections.abc import Callable, Mapping

from worker import log
from worker.attempt import CANCELLED
from worker.background import Background
from worker.broker import Broker
from worker.inflight import InFlight
from worker.keys import HEARTBEAT_S
from worker.link import Link, LinkDownError
from worker.metrics import Metrics
from worker.partitions import Partitions
from worker.settings import Settings

CLEAN_BEATS = 3
"""Heartbeats between two looks for consumers of workers that are gone."""

_log = log.get("leases")


class Leases(Background):
    """The lease thread."""

    def __init__(
        self,
        broker: Broker | Partitions,
        link: Link,
        inflight: InFlight,
        *,
        metrics: Metrics,
        settings: Settings,
        stalled_for_s: Callable[[], float],
        about: Callable[[], Mapping[str, str | int | float]],
    ) -> None:
        """`about` is what the heartbeat says of the worker."""
        super().__init__("leases")
        self._broker = broker
        self._link = link
        self._faults = log.Throttle(log.FAULT_LINE_S)
        self._inflight = inflight
        self._metrics = metrics
        self._settings = settings
        self._stalled_for_s = stalled_for_s
        self._about = about
        self._renewed_at = time.monotonic()
        self._renew_at = 0.0
        self._num_beats = 0

    def is_current(self) -> bool:
        """Whether no lease of ours can have run out."""
        return time.monotonic() - self._renewed_at < self._settings.lease_s

    def age_max_s(self) -> float:
        """Seconds since the last renewal while anything is held, else 0."""
        return time.monotonic() - self._renewed_at if self._inflight.num_held else 0.0

    def _run(self) -> None:
        beat_at = 0.0
        while not self._leave.is_set():
            now = self.turned_at = time.monotonic()
            try:
                self._renew_in_time()
                if now >= beat_at:
                    self.beat()
                    self._renew_in_time()  # each partition is asked by itself, and a server may be slow
                    self.look()
                    beat_at = now + HEARTBEAT_S
            except LinkDownError:
                self._link.pause()
                continue
            except Exception:  # noqa: BLE001  without this thread every lease is lost
                self._faults.write(_log.error, "renewal_failed", exc_info=True)
                self._link.pause()
            self._leave.wait(max(0.0, min(self._renew_at, beat_at) - time.monotonic()))

    def _renew_in_time(self) -> None:
        if (now := time.monotonic()) >= self._renew_at:
            self.renew()
            self._renew_at = now + self._settings.renew_s

    def renew(self) -> None:
        """Extend all leases, drop what others have taken, end what was cancelled."""
        if self._stalled_for_s() > self._settings.stall_s:
            _log.error("engine_stalled", renews="no", seconds=round(self._stalled_for_s()))
            return
        held, started = self._inflight.held(), time.monotonic()
        if not held:
            self._renewed_at = started
            return
        reply = self._link.call("renew", lambda: self._broker.renew([attempt.delivery for attempt in held]))
        self._renewed_at = started
        self._metrics.lease_renew_duration_seconds.observe(time.monotonic() - started)
        for attempt in held:
            if attempt.ending:
                continue  # its end is on the way: whether that was refused, the publisher learns by itself
            if attempt.delivery.job_id in reply.lost and self._inflight.drop(attempt, "renew"):
                self._metrics.leases_lost.labels("taken").inc()
            elif attempt.delivery.job_id in reply.cancelled:
                self._inflight.ask(attempt, CANCELLED)

    def beat(self) -> None:
        """Say that we live, and now and then sweep up behind workers that are gone."""
        self._link.call("heartbeat", lambda: self._broker.heartbeat(self._about()))
        if self._num_beats % CLEAN_BEATS == 0:
            self._link.call("clean_up", self._broker.clean_up)
        self._num_beats += 1

    def look(self) -> None:
        """Read how full the queue is."""
        is_paused, num_dead = self._link.call("queue_counts", self._broker.paused_and_dead)
        counts = self._link.call("queue_counts", self._broker.queue_counts)
        self._metrics.queue(counts, is_paused=is_paused, num_dead=num_dead)
