"""The lease thread's turns, by a clock that calls to a slow server move."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from engine.config import EngineConfig
from worker import log
from worker.attempt import Attempt
from worker.broker import LaneCounts
from worker.claims import Delivery, RenewReply
from worker.inflight import InFlight
from worker.keys import LANES
from worker.leases import Leases
from worker.link import Link
from worker.metrics import Metrics
from worker.settings import Settings

SLOW_S = 6.0
"""Four partitions, asked one after another, that take 1.5 seconds each."""
ANSWERS: dict[str, object] = {
    "renew": RenewReply(set(), set()),
    "queue_counts": dict.fromkeys(LANES, LaneCounts(0, 0, 0.0)),
    "paused_and_dead": (False, 0),
}


class SlowBroker:
    """Every call takes `SLOW_S` of the clock that it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.renewed_at: list[float] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_: self._answer(name)

    def _answer(self, name: str) -> object:
        if name == "renew":
            self.renewed_at.append(self.now)
        self.now += SLOW_S
        return ANSWERS.get(name)


def test_leases_are_renewed_in_time_though_each_call_takes_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    broker: Any = SlowBroker()
    monkeypatch.setattr(time, "monotonic", lambda: broker.now)
    metrics, settings = Metrics(), Settings(engine=EngineConfig(model="m"))
    inflight = InFlight(metrics, lambda _: None)
    inflight.add(Attempt(Delivery("a", "1-1", "normal", {}, 0, 1, 1, "a:1", 7, 0, 0, "new")))
    link = Link("leases", metrics, log.Throttle())
    leases = Leases(broker, link, inflight, metrics=metrics, settings=settings, stalled_for_s=lambda: 0.0, about=dict)

    def wait(timeout_s: float) -> None:
        broker.now += timeout_s
        if broker.now > 300:
            leases._leave.set()

    monkeypatch.setattr(leases._leave, "wait", wait)
    leases._run()
    ages = [later + SLOW_S - earlier for earlier, later in pairwise(broker.renewed_at)]
    assert len(ages) > 10
    assert max(ages) < settings.lease_s
