"""A thread of the worker that runs until it is told to leave.

Leaves what it does to those who derive from it. A thread that waits for a server that does not answer is not waited for.
"""

import threading
import time

STOP_S = 1.0


class Background:
    """Derive, call `super().__init__`, and let `_run` come back soon after `_leave` is set."""

    def __init__(self, name: str) -> None:
        self._leave = threading.Event()
        self.turned_at = time.monotonic()
        """When its loop last came around, where it tells; a probe watches it."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def name(self) -> str:
        """What the thread is called."""
        return self._thread.name

    @property
    def has_died(self) -> bool:
        """Whether it ran, and ended though nobody told it to."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._leave.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; wait for it no longer than `STOP_S`."""
        self._leave.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _run(self) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        """Interrupt what the thread waits for, other than `_leave`."""
