"""What systemd hears from a service: a datagram socket as NOTIFY_SOCKET names it, and the lines that came."""

import contextlib
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 20.0


class InitSystem:
    """A listener. `address` is for NOTIFY_SOCKET; `lines` has what was heard so far, in order."""

    def __init__(self, directory: Path | None = None) -> None:
        """At a path in `directory`, or at an abstract address."""
        self.address = str(directory / "notify") if directory else f"@slotmill-test-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address.replace("@", "\0", 1))
        self.lines: list[str] = []

    def environ(self, watchdog_s: float | None = None, pid: int | None = None) -> dict[str, str]:
        """What systemd gives a service; `pid` is the process that it watches."""
        variables = {"NOTIFY_SOCKET": self.address}
        if watchdog_s is not None:
            variables["WATCHDOG_USEC"] = f"{watchdog_s * 1e6:.0f}"
        return variables | ({"WATCHDOG_PID": str(pid)} if pid is not None else {})

    def next(self, timeout_s: float = 10.0) -> list[str]:
        """The lines of one message; none when none comes in time."""
        self._socket.settimeout(timeout_s)
        try:
            lines = self._socket.recv(4096).decode().split("\n")
        except TimeoutError:
            return []
        self.lines += lines
        return lines

    def wait_for(self, is_meant: Callable[[str], bool], timeout_s: float = TIMEOUT_S) -> str:
        """The first line from now on that is meant."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for line in self.next(left):
                if is_meant(line):
                    return line
        raise AssertionError(f"not heard within {timeout_s:g} s; the last lines were {self.lines[-8:]}")

    def wait_for_silence(self, at_least_s: float) -> None:
        """Wait until nothing has fed the watchdog for so long."""
        deadline, fed_at = time.monotonic() + TIMEOUT_S, time.monotonic()
        while time.monotonic() - fed_at < at_least_s:
            assert time.monotonic() < deadline, f"the watchdog was fed for {TIMEOUT_S:g} s"
            if "WATCHDOG=1" in self.next(0.05):
                fed_at = time.monotonic()

    def forget(self) -> None:
        """Drop what waits to be heard."""
        while self.next(0.0001):
            pass

    def fill(self) -> None:
        """Send until it takes no more."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(BlockingIOError):
            sender.setblocking(False)
            while True:
                sender.sendto(b"X=1", self._socket.getsockname())

    def close(self) -> None:
        self._socket.close()
