"""Logs: events with fields on stderr, JSON when stderr is not a terminal.

An attempt leaves one line when it leaves the worker (ended, released or fenced) and one more when something went wrong in it,
none with prompt text. Relies on structlog; leaves what is worth a line to the callers.
"""

import logging
import sys
import threading
import time
from typing import Any

import structlog

Logger = structlog.typing.FilteringBoundLogger


def configure(*, verbose: bool = False) -> None:
    """Set up logging for this process; `verbose` shows debug lines, tracebacks among them."""
    renderer: Any = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _what_happened_first,
        renderer,
    ]
    if not sys.stderr.isatty():
        processors.insert(3, structlog.processors.format_exc_info)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),  # whatever that is by then
        cache_logger_on_first_use=False,
    )


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
