"""The live screen of `worker top`: looks from a thread, keys as they are pressed, the terminal as large as it is now.

Relies on rich for the screen and on termios for the keys, and leaves the terminal as it found it. The thread lets keys be
obeyed while a worker keeps a look waiting. A server that goes away is waited for, as a worker does; the view says so.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator

import redis
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from worker.background import Background
from worker.top.view import ViewState, render
from worker.top.watch import Look, Watch

KEY_S = 0.1
"""How soon a new look, or a new size of the terminal, is shown."""
HELP = (" q quit", "p pause", "↑ ↓ 1-9 choose a worker")
ESCAPES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}


class Keys:
    """The keyboard of the terminal `fd`, or none."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def pressed(self, timeout_s: float) -> list[str]:
        """Characters typed, `up` and `down`, waiting up to `timeout_s` for the first."""
        if self._fd is None:
            time.sleep(timeout_s)
            return []
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return []
        typed = os.read(self._fd, 64)
        if not typed:  # the terminal is gone
            self._fd = None
        return split(typed)


def split(typed: bytes) -> list[str]:
    """What was typed as keys; escape sequences that have no meaning here are none."""
    keys = []
    while typed:
        if known := next((sequence for sequence in ESCAPES if typed.startswith(sequence)), None):
            keys.append(ESCAPES[known])
            typed = typed[len(known) :]
        elif typed.startswith(b"\x1b"):
            break
        else:
            keys.append(chr(typed[0]))
            typed = typed[1:]
    return keys


@contextlib.contextmanager
def keyboard() -> Iterator[Keys]:
    """Keys without a return behind them and without an echo; Ctrl-C stays what it is."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):  # no terminal, or no file at all
        yield Keys(None)
        return
    try:
        tty.setcbreak(fd)
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class Looking(Background):
    """The thread that looks; `newest` is what it saw last, `trouble` why it sees nothing new."""

    def __init__(self, watch: Watch, interval_s: float, first: Look) -> None:
        super().__init__("looking")
        self._watch = watch
        self._interval_s = interval_s
        self.newest = first
        self.trouble = ""

    def _run(self) -> None:
        while not self._leave.wait(self._interval_s):
            try:
                self.newest = self._watch.look(lambda: not self._leave.is_set())
                self.trouble = ""
            except redis.RedisError as error:
                self.trouble = f"the server does not answer: {' '.join(str(error).split())}"
            except Exception as error:  # noqa: BLE001  a view that stands still must say so
                self.trouble = f"a look failed: {type(error).__name__}: {' '.join(str(error).split())}"


class Screen:
    """What is shown, and what keys do to it."""

    def __init__(self, first: Look, worker_id: str, start: str) -> None:
        """`start` is a command that starts a worker."""
        self._look = first
        self._start = start
        self.state = ViewState(chosen=worker_id)
        self.is_left = False

    def take(self, newest: Look, trouble: str) -> None:
        """Show this from now on, unless the display is paused."""
        self.state.trouble = trouble
        if not self.state.is_paused:
            self._look = newest

    def press(self, key: str) -> None:
        """Obey a key; others are passed over."""
        if key in ("q", "Q"):
            self.is_left = True
        elif key in ("p", "P", " "):
            self.state.is_paused = not self.state.is_paused
        elif key in ("up", "k", "down", "j"):
            self._choose(self.state.index(self._look) + (1 if key in ("down", "j") else -1))
        elif key.isdecimal() and key != "0":
            self._choose(int(key) - 1)

    def _choose(self, number: int) -> None:
        if self._look.workers:
            self.state.chosen = self._look.workers[max(0, min(number, len(self._look.workers) - 1))].id

    def lines(self, width: int, height: int) -> list[Text]:
        """All lines of a terminal of this size; the last one tells of the keys."""
        lines = render(self._look, self.state, width, height - 1, self._start)[: height - 1]
        lines += [Text() for _ in range(height - 1 - len(lines))]
        return [*lines, Text("   ".join(HELP)[:width], "bright_black", end="")]


def show(watch: Watch, interval_s: float, worker_id: str, start: str) -> None:
    """Until q, Ctrl-C or SIGTERM. The first look decides whether there is a server."""
    console = Console(highlight=False)
    first = watch.look()
    screen, looking = Screen(first, worker_id, start), Looking(watch, interval_s, first)
    looking.start()
    ended = signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the terminal would be left as it is now
    try:
        with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            shown: object = None
            while not screen.is_left:
                screen.take(looking.newest, looking.trouble)
                lines = screen.lines(*console.size)
                if lines != shown:
                    live.update(Group(*lines), refresh=True)
                    shown = lines
                for key in keys.pressed(KEY_S):
                    screen.press(key)
    except KeyboardInterrupt:  # the way out
        return
    finally:
        signal.signal(signal.SIGTERM, ended)
        looking.stop()
