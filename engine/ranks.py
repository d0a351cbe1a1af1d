"""The other processes of a tensor-parallel engine, as the first sees them: started, told what to do, watched.

Imports no torch, so that they load theirs while the first loads its own. Leaves what they are told, and what they do then, to
parallel.py. They end with the process that started them, by the end of the pipe or, while they compute, by the kernel.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import Any

from engine.config import EngineConfig

LEAVE_S = 3.0
"""How long a process may take to leave before it is killed."""
NEWS_S = 1.0
"""A call that fails may have failed for a dead process: so long it waits for the news, which ends this one."""

Told = tuple[str, tuple[Any, ...]] | tuple[EngineConfig, Path] | int | None
"""A method of the runner to call and its arguments; at first what to load and where to meet; a number agreed on; to leave."""


class Ranks:
    """Ranks 1 to `size` - 1: their processes and pipes, and the thread that listens to them."""

    def __init__(self, size: int, on_lost: Callable[[str], None]) -> None:
        """Start them. Should one be lost, `on_lost` is called from a thread, with one line that says which and how.

        It should end this process, which may wait for the lost one for ever.
        """
        self._on_lost = on_lost
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  without a name: nothing is left of it, whoever is killed
        self.store = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
        """Where they meet: a file that all of them can open."""
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_leaving = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._conns: list[Connection] = []
        for rank in range(1, size):
            self._start(rank, size)
        self._watcher = threading.Thread(target=self._watch, name="rank-watcher", daemon=True)
        self._watcher.start()

    def tell(self, message: Told) -> None:
        """Send all children the same. What is sent to a dead one is lost: the watcher knows."""
        blob = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)  # a Connection's own pickling would share tensors' memory
        for conn in self._conns:
            with contextlib.suppress(OSError):
                conn.send_bytes(blob)

    def least(self, number: int) -> int:
        """The least of this number and one from each child, which is told as well."""
        number = min(number, *(self._numbers.get() for _ in self._conns))
        self.tell(number)
        return number

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Give the news of a dead child precedence over the errors that its death causes here."""
        try:
            yield
        except Exception:
            self._watcher.join(NEWS_S)
            raise

    def close(self, leave_s: float = LEAVE_S) -> None:
        """Make them leave; kill what is there after `leave_s` seconds."""
        self._is_leaving = True
        self.tell(None)
        for process in self._processes:
            try:
                process.wait(leave_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._watcher.join()
        for conn in self._conns:
            conn.close()
        self._file.close()

    def _start(self, rank: int, size: int) -> None:
        ours, theirs = socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "engine.parallel", "--fd", str(theirs.fileno())]
            self._processes.append(
                subprocess.Popen(
                    [*command, "--rank", str(rank), "--size", str(size)], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
            )
        self._conns.append(Connection(ours.detach()))

    def _watch(self) -> None:
        """Hand on what children say, until one is gone or all leave."""
        lost = None
        while lost is None and not self._is_leaving:
            for conn in wait(self._conns):
                assert isinstance(conn, Connection)
                lost = lost or self._hear(self._conns.index(conn))
        if not self._is_leaving and lost is not None:
            self._on_lost(lost)

    def _hear(self, index: int) -> str | None:
        """Take in one message of a child; why it is lost, if it is."""
        try:
            message = self._conns[index].recv()
        except (EOFError, OSError):
            code = self._processes[index].wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return f"tensor_parallel: the process of rank {index + 1} {how}; the others cannot go on without it"
        if isinstance(message, str):
            return f"tensor_parallel: rank {index + 1}: {message}"
        self._numbers.put(message)
        return None
