"""Tells systemd how the worker fares: ready, what it does, leaving; and feeds its watchdog while there is progress.

Speaks the protocol of sd_notify(3): datagrams of `NAME=value` lines to the socket that NOTIFY_SOCKET names. Does nothing where
that is not set. Relies on the probes for what is ready and what is alive.

1. READY=1 is said once, when the worker can take jobs. Until then each message extends the time that systemd allows a start:
   nobody knows how long a model takes to fetch and to load.
2. WATCHDOG=1 is said while the worker is alive in the sense of `/livez`, not by a timer: its loops come around, no thread has
   died, and an engine with work makes steps. Whatever the worker mends by itself it mends before.
3. What was not taken is said again.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping

from worker import log
from worker.background import Background

MAX_PAUSE_S = 5.0
"""Seconds between two looks, at most; systemd is told only what has changed."""
STARTING_PAUSE_S = 0.2
MIN_PAUSE_S = 0.005
MORE_S = 60
"""Seconds that a start may take from the last message on."""
IO_TIMEOUT_S = 1.0

_log = log.get("notify")


class Notifier(Background):
    """The thread that reports to systemd. Its functions answer why not, or an empty string, as probes do."""

    def __init__(
        self,
        status: Callable[[], str],
        not_live: Callable[[], str],
        not_ready: Callable[[], str],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`status` is a line for people, which `systemctl status` shows."""
        super().__init__("notify")
        self._describe, self._not_live, self._not_ready = status, not_live, not_ready
        self._address = _address(environ)
        self._watchdog_s = _watchdog_s(environ)
        self._said_ready = False
        self._status = self._why_silent = ""

    def start(self) -> None:
        """Start the thread, where somebody listens."""
        if self._address:
            super().start()

    def stopping(self, within_s: float) -> None:
        """Say that the worker leaves and how long that may take, so that systemd does not cut the drain short."""
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={within_s * 1e6:.0f}")

    def _run(self) -> None:
        while not self._leave.is_set():
            self._tell_news()
            self._leave.wait(self._pause_s())

    def _tell_news(self) -> None:
        """Say what systemd does not know yet; it knows what it has taken."""
        is_ready = self._said_ready or not self._not_ready()
        lines = ["READY=1"] if is_ready and not self._said_ready else []
        why_silent = self._not_live()
        if not why_silent:
            lines.append("WATCHDOG=1" if is_ready else f"EXTEND_TIMEOUT_USEC={MORE_S * 1_000_000}")
        elif not self._why_silent:
            _log.error("watchdog_not_fed", why=why_silent)
        self._why_silent = why_silent
        if (status := why_silent or self._describe()) != self._status:
            lines.append(f"STATUS={status}")
        if self._send(*lines):
            self._said_ready, self._status = is_ready, status

    def _pause_s(self) -> float:
        """A third of the watchdog's time: one message may be late."""
        pause_s = MAX_PAUSE_S if self._said_ready else STARTING_PAUSE_S
        return max(MIN_PAUSE_S, min(pause_s, self._watchdog_s / 3))

    def _send(self, *lines: str) -> bool:
        """Whether it was taken. An init system that does not listen is no reason to stop working."""
        if not self._address or not lines:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(IO_TIMEOUT_S)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return False
        return True


def _address(environ: Mapping[str, str]) -> str:
    """The socket to speak to: a path, or after `@` a name of Linux' abstract namespace; other kinds are for other machines."""
    name = environ.get("NOTIFY_SOCKET", "")
    return name.replace("@", "\0", 1) if name.startswith("@") else name if name.startswith("/") else ""


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """Seconds after which the watchdog bites; infinite without one, or where it watches another process."""
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    is_ours = re.fullmatch("0*[1-9][0-9]{0,18}", usec, re.ASCII) and pid in ("", str(os.getpid()))
    return int(usec) / 1e6 if is_ours else float("inf")
