"""How busy the machine was while something ran: the cores of this program with its children, and those of all others.

A measurement beside a busy neighbour says little; so each run's record holds what the others took.
"""

import contextlib
import time
from types import TracebackType
from typing import Self

import psutil


class Meter:
    """A context that counts. At its end `cores` says what was used, on average, of the machine's."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.cores: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._own, self._busy, self._steal, self._start = _own_s(), *_machine_s(), time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.wall_s = time.perf_counter() - self._start
        own = _own_s() - self._own
        busy, steal = _machine_s()
        taken = {"own": own, "others": max(0.0, busy - self._busy - own), "stolen": steal - self._steal}
        self.cores = {who: round(seconds / self.wall_s, 3) for who, seconds in taken.items()}


def _own_s() -> float:
    """CPU seconds of this process and of all below it that live."""
    this, total = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _machine_s() -> tuple[float, float]:
    """CPU seconds that all processes used, and those that the host kept for itself."""
    times = psutil.cpu_times()
    used = sum(getattr(times, part, 0.0) for part in ("user", "nice", "system", "irq", "softirq"))
    return used, getattr(times, "steal", 0.0)
