"""Standard error that nobody waits for, whether its reader stands still or is gone.

A pipe that is not read is full soon, and a write to it waits for as long as that lasts: the threads that log would stand still
with it, and jobs, leases and the engine with them. Leaves what a line says to `log`.

1. What there is room for is written at once, by the thread that logs.
2. What there is no room for is kept, up to `MAX_KEPT_BYTES`, and goes first when there is; what comes then is lost, by lines.
3. A write never fails, and waits for `PATIENCE_S` at most: once, until there is room again.
4. A terminal has room as soon as it has some, and a write of more waits for the rest: for as long as a connection stands still.
   Of a pipe another process may take the room that was just seen. So either is opened anew for each write, not to wait; what
   others share with us stays as it is.
"""

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Iterator

MAX_KEPT_BYTES = 1 << 20
PATIENCE_S = 0.05
EXIT_S = 1.0
"""How long a process that leaves waits for a reader."""
REST_S = 0.001
AT_ONCE = select.PIPE_BUF
"""So many bytes a pipe that has any room takes without a wait."""


class Stderr:
    """A stream for text. Threads may share it."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._is_full = False
        self._num_lost = 0

    def write(self, text: str) -> None:
        """Write a line, or keep or lose it."""
        line = text.encode(errors="backslashreplace")
        with self._lock:
            if len(self._kept) + len(line) > max(MAX_KEPT_BYTES, len(line)):
                self._num_lost += 1
            else:
                self._kept += line
            self._push(0.0 if self._is_full else PATIENCE_S)

    def flush(self) -> None:
        """Nothing: what can be written is."""

    def drain(self) -> None:
        """Write what is kept, for `EXIT_S` at most."""
        with self._lock:
            self._push(EXIT_S)

    def take_num_lost(self) -> int:
        """Lines that were lost since the last call; 0 while nobody would read of them."""
        with self._lock:
            lost, self._num_lost = (0, self._num_lost) if self._kept else (self._num_lost, 0)
            return lost

    def _push(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        with _unwaiting(self._fd) as fd:
            self._is_full = False
            while self._kept and not self._is_full:
                is_written = self._has_room(max(0.0, until - time.monotonic())) and self._has_written(fd)
                self._is_full = not is_written and time.monotonic() >= until

    def _has_written(self, fd: int) -> bool:
        try:
            written = os.write(fd, self._kept[:AT_ONCE])
        except BlockingIOError:  # less room than it takes, or somebody else has it
            time.sleep(REST_S)
            return False
        except OSError:
            written = len(self._kept)  # nobody reads it any more, or it cannot be stored
        del self._kept[:written]
        return True

    def _has_room(self, patience_s: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(patience_s * 1000))


@contextlib.contextmanager
def _unwaiting(fd: int) -> Iterator[int]:
    """`fd`, or of a terminal or a pipe one that never waits."""
    try:
        is_shared = stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd)
        own = os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC) if is_shared else None
    except OSError:  # somebody else's, or closed
        own = None
    try:
        yield fd if own is None else own
    finally:
        if own is not None:
            os.close(own)
