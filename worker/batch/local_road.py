"""The local road: a batch file on engines of this machine, without a queue or a server.

The worker's own parts (consumer, publisher, fleet, reader) run unchanged around a `FileBroker`; here they are put together and
taken apart, as `worker/process.py` does for a worker. The main thread takes lines and writes what has ended, so the memory that
a file takes is that of the lines in flight. Leaves files to `BatchOutput`, words to `run_command`.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty

from engine.messages import Abort
from engine.request import Request
from worker import log
from worker.batch.file_broker import FileBroker
from worker.batch.lines import outcome_of
from worker.batch.output import BatchOutput, Order
from worker.batch.plan import Plan
from worker.consumer import Consumer
from worker.errors import EngineUnavailable
from worker.fleet import Fleet
from worker.frames import Result
from worker.inflight import InFlight
from worker.link import Link
from worker.metrics import PREFIX, SLOT_STATES, Metrics
from worker.publisher import Publisher
from worker.settings import Settings

ORDERED_WINDOW = 4096
"""Lines that may be read ahead of the first one that has not ended, where answers wait for their turn."""


@dataclass(slots=True)
class Summary:
    """A run in numbers."""

    num_lines: int = 0
    """That ended in this run."""
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Generated ones."""
    ready_at: float | None = None
    """`time.monotonic` of when the first engine was ready: loading says nothing of the speed."""
    ended_at: float = 0.0
    slot_steps: Mapping[str, int] = field(default_factory=dict)
    """Places in steps, by what they were used for."""

    @property
    def seconds(self) -> float:
        """From the first engine that was ready until now, or until the end."""
        return 0.0 if self.ready_at is None else (self.ended_at or time.monotonic()) - self.ready_at

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens in a second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def add(self, result: Result, *, is_error: bool) -> None:
        """Count one line."""
        self.num_lines += 1
        self.num_failed += is_error
        self.num_prompt_tokens += result.usage.prompt_tokens
        self.num_tokens += result.usage.completion_tokens


class LocalRoad:
    """One run over a file. `run` once, from the main thread."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        output: BatchOutput,
        batch_id: str,
        *,
        order: Order = "done",
        on_progress: Callable[[Summary], None] = lambda _: None,
    ) -> None:
        """`on_progress` is called from time to time, and after each line."""
        self.summary = Summary()
        self._output = output
        self._on_progress = on_progress
        self._signals = 0
        self._metrics = Metrics(num_engines=len(settings.engines))
        self._broker = FileBroker(plan.todo(), batch_id, "local", ORDERED_WINDOW if order == "input" else None)
        sends = (partial(self._send, engine) for engine in range(len(settings.engines)))
        self._inflight = InFlight(self._metrics, *sends)
        self._fleet = Fleet(
            settings.engines,
            settings.engine_command,
            self._inflight,
            metrics=self._metrics,
            model=settings.model_name,
            stall_s=settings.stall_s,
        )
        of_all = {"metrics": self._metrics}
        self._publisher = Publisher(
            self._broker, self._link("publisher"), self._inflight, model=settings.model_name, may_write=lambda: True, **of_all
        )
        self._consumer = Consumer(
            self._broker, self._link("consumer"), self._inflight, engines=self._fleet, settings=settings, **of_all
        )

    def run(self) -> Summary:
        """Go through the file. `KeyboardInterrupt` after a signal, `EngineUnavailable` without an engine: what has ended is
        written then.
        """
        parts = (self._publisher, self._fleet)
        with self._signals_noted():
            try:
                for part in parts:
                    part.start()
                self._consumer.run(self._may_go_on)
                self.summary.ended_at = time.monotonic()
            finally:
                for part in parts:
                    part.stop()
            self._write()
        if self._fleet.failure is not None:
            raise EngineUnavailable(f"no engine: {self._fleet.failure}")
        if not self._broker.is_done:
            raise KeyboardInterrupt
        self.summary.slot_steps = self._slot_steps()
        return self.summary

    def _may_go_on(self) -> bool:
        """Write what has ended, then say whether there is more to come."""
        self._write()
        if self.summary.ready_at is None and self._fleet.serving:
            self.summary.ready_at = time.monotonic()
        self._on_progress(self.summary)
        return not self._signals and self._fleet.failure is None and not self._broker.is_done

    def _write(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                result = self._broker.ended.get_nowait()
                outcome = outcome_of(result)
                self._output.write(outcome)
                self.summary.add(result, is_error=outcome.is_error)

    def _slot_steps(self) -> dict[str, int]:
        name, look_up = f"{PREFIX}_slot_steps_total", self._metrics.registry.get_sample_value
        return {state: int(look_up(name, {"state": state}) or 0) for state in SLOT_STATES}

    def _link(self, name: str) -> Link:
        return Link(name, self._metrics, log.Throttle())

    def _send(self, engine: int, message: Request | Abort) -> None:
        self._fleet.send(engine, message)

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Count only: a handler may run while this very thread holds a lock."""

        def note(*_: object) -> None:
            self._signals += 1

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
