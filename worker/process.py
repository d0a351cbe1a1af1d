"""The worker process: its threads, its signals, and the orderly way out.

    main            consumer: takes jobs, and waits
    engine-reader   bridge and reader, one for each engine: tokens in, text out
    engine-sender   bridge, one for each engine: requests and aborts
    publisher       frames and results
    leases          renewals, heartbeat, queue gauges
    control         cancel requests, and answers to those who look
    health          probes and scrapes
    notify          what systemd is told, where it listens

Never imports torch. Leaves every decision to the parts; here they are put together and taken apart.
"""

import os
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from engine.messages import Abort, EngineReady
from engine.request import Request
from worker import log, summary
from worker.attempt import RELEASED_BY_DRAIN
from worker.broker import Broker
from worker.connection import connect, hide_password
from worker.consumer import Consumer
from worker.control import Control
from worker.errors import EngineUnavailable
from worker.fleet import Fleet
from worker.health import HealthServer, Probes
from worker.inflight import InFlight
from worker.leases import Leases
from worker.link import Link
from worker.metrics import Metrics, Watched
from worker.notify import Notifier
from worker.partitions import Partitions
from worker.publisher import Publisher
from worker.reader import memory_fields
from worker.self_view import SelfView
from worker.settings import Settings
from worker.snapshot import encode
from worker.tracing import Tracing

MAX_SILENCE_S = 10.0
"""A worker that no script has run for this long is not ready."""
MAX_TURN_S = 60.0
"""A loop that has not come around for this long, of the main thread, the publisher or the leases, is not alive."""
RELEASE_S = 3.0
"""How long a leaving worker tries to give back what is left."""
LEAVE_S = 15.0
"""How long it then takes to stop engines and threads, at most."""

_log = log.get("process")


class _Part(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class WorkerProcess:
    """One worker. `run` once, from the main thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._signals = 0
        self.metrics = Metrics(num_engines=len(settings.engines))
        self._throttle = log.Throttle()
        self._links: list[Link] = []
        self._brokers: list[Broker] = []
        self._tracing = _tracing(settings)
        sends = (partial(self._send, engine) for engine in range(len(settings.engines)))
        self._inflight = InFlight(self.metrics, *sends, tracing=self._tracing)
        self._fleet = Fleet(
            settings.engines,
            settings.engine_command,
            self._inflight,
            metrics=self.metrics,
            model=settings.model_name,
            stall_s=settings.stall_s,
            on_first_ready=self._introduce,
        )
        self._leases = Leases(
            *self._road("leases"),
            self._inflight,
            metrics=self.metrics,
            settings=settings,
            stalled_for_s=self._fleet.stalled_for_s,
            about=self._about,
        )
        self._publisher = Publisher(
            *self._road("publisher"),
            self._inflight,
            metrics=self.metrics,
            model=settings.model_name,
            may_write=self._leases.is_current,
        )
        self._consumer = Consumer(
            *self._road("consumer"), self._inflight, engines=self._fleet, metrics=self.metrics, settings=settings
        )
        self._view = SelfView(settings, self._inflight, self._fleet, self.metrics)
        self._controls = [
            Control(self._broker(queue), self._link("control"), self._inflight, self._snapshot) for queue in settings.queues
        ]
        probes = Probes(self.metrics.registry, self._not_live, self._not_ready)
        self._health = HealthServer(settings.metrics_host, settings.metrics_port, probes)
        self._notifier = Notifier(self._status, self._not_live, self._not_ready)

    def run(self) -> int:
        """Work until a signal, or the end of a burst; the exit code. `EngineUnavailable` when there is no engine to be had."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._announce()
        try:
            parts: tuple[_Part, ...] = (
                self._health,
                self._notifier,
                self._fleet,
                self._leases,
                self._publisher,
                *self._controls,
            )
            for part in parts:
                part.start()
            self._consumer.run(self._may_go_on)
            self._drain()
        finally:
            self._stop()
        if self._fleet.failure is not None:
            raise EngineUnavailable(f"no engine: {self._fleet.failure}")
        _log.info("worker_left")
        return 0

    def _announce(self) -> None:
        settings = self._settings
        log.bind(worker=settings.worker_id, queue=settings.queue)
        self.metrics.worker_info.info({"queue": settings.queue, "gpu": settings.device_names})
        self.metrics.forget_queue()
        self.metrics.watch(
            Watched(self._state, self._is_connected, self._leases.age_max_s, lambda: self._publisher.num_buffered_tokens)
        )
        _log.info(
            "worker_started",
            worker=settings.worker_id,
            queue=settings.queue,
            redis=hide_password(settings.redis_url),
            device=settings.device_names,
            model=settings.model_name,
            metrics=f"{self._health.url}/metrics",
        )

    def _introduce(self, ready: EngineReady) -> None:
        """Say what the worker is and has, now that it can serve: as fields in JSON, as lines to people."""
        facts = summary.facts(self._settings, ready, self._health.url)
        told = facts | memory_fields(ready.memory_rows)
        as_it_is = {"stack": summary.text(facts, ready.memory_rows)}  # the one field that a text log does not quote
        _log.info("worker_ready", **(told if log.is_ours_alone() else as_it_is))

    def _drain(self) -> None:
        """Go on with what is in hand for a while, then give back the rest."""
        until = time.monotonic() + self._settings.drain_s
        self._notifier.stopping(self._settings.drain_s + RELEASE_S + LEAVE_S)
        self._consumer.give_back_claimed()
        if self._inflight.num_held:
            _log.info("draining", jobs=self._inflight.num_held, at_most_s=self._settings.drain_s)
        while self._inflight.num_held and self._signals < 2 and self._fleet.serving and (left := until - time.monotonic()) > 0:
            self._consumer.wait_for_room(min(left, 0.25))
        until = time.monotonic() + RELEASE_S
        for attempt in self._inflight.held():
            self._inflight.end(attempt, RELEASED_BY_DRAIN)
        while self._inflight.num_held and (left := until - time.monotonic()) > 0:
            self._consumer.wait_for_room(min(left, 0.25))
        if self._inflight.num_held:
            _log.warning("left_to_their_leases", jobs=self._inflight.num_held)

    def _stop(self) -> None:
        parts: tuple[_Part, ...] = (*self._controls, self._publisher, self._leases, self._fleet, self._notifier, self._health)
        for part in parts:
            part.stop()
        self._consumer.say_goodbye()
        for broker in self._brokers:
            broker.close()
        if self._tracing:
            self._tracing.stop()

    def _send(self, engine: int, message: Request | Abort) -> None:
        self._fleet.send(engine, message)

    def _may_go_on(self) -> bool:
        return not self._signals and self._fleet.failure is None

    def _on_signal(self, *_: object) -> None:
        """Count only: a handler may run while this very thread holds a lock."""
        self._signals += 1

    def _road(self, name: str) -> tuple[Broker | Partitions, Link]:
        """A road of its own for one thread, to all partitions of the queue."""
        brokers = [self._broker(queue) for queue in self._settings.queues]
        return brokers[0] if len(brokers) == 1 else Partitions(brokers), self._link(name)

    def _broker(self, queue: str) -> Broker:
        settings = self._settings
        broker = Broker(connect(settings.redis_url, queue), queue, settings.worker_id, settings.lease_s)
        self._brokers.append(broker)
        return broker

    def _link(self, name: str) -> Link:
        link = Link(name, self.metrics, self._throttle)
        self._links.append(link)
        return link

    def _about(self) -> Mapping[str, str | int | float]:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "gpu": self._settings.device_names,
            "model": self._settings.model_name,
            "state": self._state(),
            "slots": self._fleet.num_slots,
            "active": self._fleet.num_slots_taken,
        }

    def _state(self) -> str:
        if self._signals:
            return "draining"
        if not self._fleet.serving:
            return "loading"
        return "stalled" if self._fleet.stalled_for_s() > self._settings.stall_s else "serving"

    def _status(self) -> str:
        """For people: what `systemctl status` shows."""
        if not self._signals and (why := self._not_ready()):
            return f"waiting: {why}"
        slots = f"{self._fleet.num_slots_taken} of {self._fleet.num_slots} slots"
        return f"{self._state()}: {slots}, {self._inflight.num_held} jobs in hand"

    def _snapshot(self) -> bytes:
        return encode(self._view.take(self._state()))

    def _is_connected(self) -> bool:
        return any(link.last_ok for link in self._links) and not any(link.is_failing for link in self._links)

    def _not_live(self) -> str:
        if (silent_s := time.monotonic() - self._consumer.turned_at) > MAX_TURN_S:
            return f"the main loop has not come around for {silent_s:.0f} s"
        if (stalled_s := self._fleet.stalled_for_s()) > self._settings.stall_s:
            return f"the engine holds work and has made no step for {stalled_s:.0f} s"
        for part in (self._leases, self._publisher):
            if (silent_s := time.monotonic() - part.turned_at) > MAX_TURN_S:
                return f"the thread {part.name} has not come around for {silent_s:.0f} s"
        if self._fleet.has_died:
            return "the thread engine-reader has ended"
        dead = [part.name for part in (self._leases, self._publisher, *self._controls) if part.has_died]
        return f"the thread {dead[0]} has ended" if dead else ""

    def _not_ready(self) -> str:
        if self._signals:
            return "draining"
        if not self._fleet.serving:
            return "the engine is loading"
        if not self._is_connected():
            return "the server does not answer, or refuses"
        newest = max(link.last_ok for link in self._links)
        return "" if time.monotonic() - newest < MAX_SILENCE_S else f"no script has run for {MAX_SILENCE_S:.0f} s"


def _tracing(settings: Settings) -> Tracing | None:
    if settings.otlp_endpoint is None:
        return None
    names = {"worker_id": settings.worker_id, "queue": settings.queue}
    return Tracing(settings.otlp_endpoint, gpu=settings.device_names, model=settings.model_name, **names)


def run(settings: Settings) -> int:
    """Run one worker to its end; the exit code.

    Errors: `InvalidOption` (a port that is taken, a missing extra), `EngineUnavailable`.
    """
    return WorkerProcess(settings).run()
