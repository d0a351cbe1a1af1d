"""The engines of one worker, as one: where the next job goes, how many slots there are, whether there is an engine at all.

Relies on a `Reader` and an `EngineSupervisor` for each; they know nothing of one another. An engine that dies takes its own
jobs along and is started again while the others go on. Leaves taking jobs to the consumer, who is inside which to `InFlight`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from engine.config import EngineConfig
from engine.messages import Abort, EngineReady
from engine.request import Request
from worker.bridge import EngineSupervisor
from worker.inflight import InFlight
from worker.metrics import Metrics
from worker.reader import Reader, Serving


class Fleet:
    """The engines, numbered from 0; the consumer's `Destination`."""

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        command: Sequence[str],
        inflight: InFlight,
        metrics: Metrics,
        model: str,
        stall_s: float,
        on_first_ready: Callable[[EngineReady], None] | None = None,
    ) -> None:
        """One engine for each of `configs`; `command` starts one, and one that stands still for `stall_s` is killed.

        `on_first_ready` is called once, with what engine 0 says when it first serves.
        """
        self._inflight = inflight
        self._metrics = metrics
        self._on_first_ready = on_first_ready
        self.readers = [
            Reader(inflight, metrics, model, partial(self._now_serves, number), engine=number) for number in range(len(configs))
        ]
        self._supervisors = [
            EngineSupervisor(config, command, reader, may_give_up=self._is_silent, stall_s=stall_s)
            for config, reader in zip(configs, self.readers, strict=True)
        ]

    def start(self) -> None:
        """Start all engines."""
        for supervisor in self._supervisors:
            supervisor.start()

    def stop(self) -> None:
        """Stop all engines."""
        for supervisor in self._supervisors:
            supervisor.leave()
        for supervisor in self._supervisors:
            supervisor.stop()

    def send(self, engine: int, message: Request | Abort) -> None:
        """Hand a message to one engine; see `EngineSupervisor.send`."""
        self._supervisors[engine].send(message)

    @property
    def failure(self) -> str | None:
        """Why an engine cannot be had any more; the worker leaves then."""
        return next((supervisor.failure for supervisor in self._supervisors if supervisor.failure is not None), None)

    @property
    def has_died(self) -> bool:
        """Whether nobody looks after one of the engines any more."""
        return any(supervisor.has_died for supervisor in self._supervisors)

    @property
    def serving(self) -> Serving | None:
        """The engine with the most free slots, of those that serve; the first of several."""
        return max(
            self._all_serving(), default=None, key=lambda each: each.ready.max_slots - self._inflight.num_slots_of(each.engine)
        )

    @property
    def num_slots(self) -> int:
        """Places in the batches of all engines that serve."""
        return sum(serving.ready.max_slots for serving in self._all_serving())

    @property
    def num_slots_taken(self) -> int:
        """Of those, the places that requests hold after the last steps."""
        return sum(state.last.num_slots_taken for state in self._metrics.engine_states)

    def has(self, serving: Serving) -> bool:
        """Whether this very engine process still serves."""
        return self.readers[serving.engine].has(serving)

    def stalled_for_s(self) -> float:
        """Seconds without a step of the engine that had work for longest without making one."""
        return max(reader.stalled_for_s() for reader in self.readers)

    def _all_serving(self) -> list[Serving]:
        return [serving for reader in self.readers if (serving := reader.serving)]

    def _now_serves(self, engine: int) -> None:
        """On the thread of this engine's reader."""
        self._inflight.changed.set()
        if engine == 0 and self._on_first_ready and (serving := self.readers[0].serving):
            self._on_first_ready(serving.ready)
            self._on_first_ready = None

    def _is_silent(self) -> bool:
        return not self._all_serving()
