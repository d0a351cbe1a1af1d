"""A bar on stderr for what takes longer than two seconds; nothing where stderr is no terminal.

Relies on rich, which is imported when there is something to show.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

PATIENCE_S = 2.0
_shown: "list[Bar]" = []


class Progress:
    """How far something is, its rate, and the time that is left. Use as a context manager."""

    def __init__(self, what: str, unit: str) -> None:
        """`what` stands before the bar, `unit` behind the rate."""
        self._what = what
        self._unit = unit
        self._is_seen = bool(sys.stderr and sys.stderr.isatty())
        self._began = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            _shown.remove(self._bar)

    def update(self, done: int, total: int, detail: str = "") -> None:
        """`done` of `total`; `detail` is shown at the end of the line."""
        if not self._is_seen or (self._bar is None and time.monotonic() - self._began < PATIENCE_S):
            return
        if self._bar is None or self._task is None:
            self._bar = _bar(self._unit)
            self._task = self._bar.add_task(self._what, total=total, completed=done, detail=detail)
            self._bar.start()
            _shown.append(self._bar)
        self._bar.update(self._task, completed=done, total=total, detail=detail)


@contextmanager
def aside() -> Iterator[None]:
    """Bars leave the terminal while a line is printed: it would be written behind them."""
    bars = list(_shown)
    for bar in bars:
        bar.stop()
    try:
        yield
    finally:
        for bar in bars:
            bar.start()


def _bar(unit: str) -> "Bar":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if not task.speed else f"{task.speed:,.{0 if task.speed >= 10 else 1}f} {unit}/s")

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        Rate(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[detail]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
