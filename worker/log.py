"""Logs: events with fields on stderr, JSON when stderr is not a terminal.

An attempt leaves one line when it leaves the worker (ended, released or fenced) and one more when something went wrong in it.
No line has text of a prompt or an answer, unless that is asked for: the message of an exception may quote what it was about,
so tracebacks come without messages. Relies on structlog; leaves what is worth a line to the callers.
"""

import logging
import sys
import threading
import time
import traceback
from typing import Any

import structlog

SHOWN_CHARS = 1000

Logger = structlog.typing.FilteringBoundLogger

_shows_prompts = False


def configure(*, verbose: bool = False, prompts: bool = False) -> None:
    """Set up logging for this process; `verbose` shows debug lines, `prompts` what jobs ask and are answered."""
    global _shows_prompts  # noqa: PLW0603  as structlog's own configuration
    _shows_prompts = prompts
    renderer: Any = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _where_it_failed,
        _what_happened_first,
        renderer,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),  # whatever that is by then
        cache_logger_on_first_use=False,
    )


def private(**texts: str) -> dict[str, str]:
    """Fields of a line that may hold what a job asks or is answered: the beginning of each, or nothing."""
    return {name: text[:SHOWN_CHARS] for name, text in texts.items()} if _shows_prompts else {}


def _where_it_failed(_logger: Any, _method: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The traceback of an exception, or of the one that is being handled, as text."""
    if not entry.pop("exc_info", None):
        return entry
    lines: list[str] = []
    error = sys.exc_info()[1]
    while error is not None:
        shown = f": {error}" if _shows_prompts else ""
        lines = [*traceback.format_tb(error.__traceback__), f"{type(error).__qualname__}{shown}\n", *lines]
        error = error.__cause__ or error.__context__
    entry["exception"] = "".join(lines).rstrip()
    return entry


def _what_happened_first(_logger: Any, _method: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {name: entry.pop(name) for name in ("timestamp", "level", "event") if name in entry} | dict(entry)


def get(name: str) -> Logger:
    """The logger of one part of the worker."""
    logger: Logger = structlog.get_logger(part=name)
    return logger


class Throttle:
    """Lets one line through every `interval_s`, over all threads, and counts what it held back."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._next = 0.0
        self._held = 0

    def admit(self) -> int | None:
        """How many lines were held back since the last one, or None when this one is held back too."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._held += 1
                return None
            held, self._held, self._next = self._held, 0, now + self._interval_s
            return held
