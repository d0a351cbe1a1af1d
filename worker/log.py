"""Logs: events with fields on stderr, JSON when stderr is not a terminal.

A job leaves four lines at most, all its attempts together: one when it has ended, and for each of the first two attempts one
when it was taken over from a dead worker and one when it left without an end (`Attempt.level`). No line has text of a prompt or
an answer, unless that is asked for: the message of an exception may quote what it was about, so tracebacks, and what libraries
say, come without messages. Relies on structlog, which is imported when there is a line to write: a producer that imports the
client hardly ever has one. Relies on `stderr` so that nobody waits for who reads; leaves what is worth a line to the callers.
"""

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from worker.stderr import Stderr

if TYPE_CHECKING:
    import structlog

SHOWN_CHARS = 1000
FAULT_LINE_S = 10.0
"""Between two lines about a fault of ours in a loop that goes on, and may meet it at each turn."""

Logger: TypeAlias = "structlog.typing.FilteringBoundLogger"

_shows_prompts = False
_is_json = False
_is_brief = False
prints: Callable[[str, Any], bool] | None = None
"""Takes a brief line where something is drawn on the terminal (`progress.print_above`); False: it is to be written."""
_bound: dict[str, str] = {}
_stderr = Stderr()
atexit.register(_stderr.drain)


def configure(*, verbose: bool = False, prompts: bool = False, form: Literal["auto", "json", "text", "brief"] = "auto") -> None:
    """Set up logging for this process; `verbose` shows debug lines, `prompts` what jobs ask and are answered.

    `form` is `auto`: text on a terminal, one JSON object a line elsewhere. `brief` is for a command that has its own words:
    errors alone, as commands say them, and what an engine writes on stderr is left out.
    """
    import structlog

    global _shows_prompts, _is_json, _is_brief  # noqa: PLW0603  as structlog's own configuration
    if sys.stderr is None:  # closed by who started us: what is opened next has its number
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  until the end
    _shows_prompts = prompts
    _is_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    _is_brief = form == "brief"
    _bound.clear()
    level = logging.DEBUG if verbose else logging.INFO
    text: Any = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    renderer: Any = _as_a_command if _is_brief else structlog.processors.JSONRenderer() if _is_json else text
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _where_it_failed,
        _who_and_what_first,
        renderer,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR if _is_brief else level),
        logger_factory=lambda *_: structlog.WriteLogger(_stream()),
        cache_logger_on_first_use=False,
    )


def _stream() -> Any:
    """`_stderr`, or what somebody has put in its place by now."""
    return _stderr if sys.stderr is sys.__stderr__ else sys.stderr


def bind(**fields: str) -> None:
    """Put `fields` on every line of this process that is JSON: where the logs of many workers meet, they tell whose it is."""
    _bound.update(fields)


def is_ours_alone() -> bool:
    """Whether nothing else must be written into stderr: a stream of JSON objects, or a command's own words."""
    return _is_json or _is_brief


def take_over() -> None:
    """Make lines of what Python and libraries would write on stderr: warnings, log records, tracebacks of threads."""
    root = logging.getLogger()
    if not any(isinstance(handler, _Library) for handler in root.handlers):
        root.addHandler(_Library())
    warnings.showwarning = _note_warning  # type: ignore[assignment]  # which of its two optional arguments it ignores
    threading.excepthook = _note_dead_thread


def private(**texts: str) -> dict[str, str]:
    """Fields of a line that may hold what a job asks or is answered: the beginning of each, or nothing."""
    return {name: text[:SHOWN_CHARS] for name, text in texts.items()} if _shows_prompts else {}


def _where_it_failed(_logger: Any, _method: str, entry: "structlog.typing.EventDict") -> "structlog.typing.EventDict":
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


def _who_and_what_first(_logger: Any, _method: str, entry: "structlog.typing.EventDict") -> "structlog.typing.EventDict":
    first = {name: entry.pop(name) for name in ("timestamp", "level", "event", "part") if name in entry}
    lost = {"lines_lost": lost} if (lost := _stderr.take_num_lost()) else {}
    return first | (_bound if _is_json else {}) | dict(entry) | lost


def _as_a_command(_logger: Any, _method: str, entry: Any) -> str:
    import structlog

    if entry.get("failed_starts"):  # whoever waits for an engine says why there is none
        raise structlog.DropEvent
    del entry["timestamp"], entry["level"], entry["part"]
    event = str(entry.pop("event")).replace("_", " ")
    line = " ".join([f"worker: {event}:", *", ".join(f"{name} {value}" for name, value in entry.items()).split()])
    if prints is not None and prints(line, sys.stderr):
        raise structlog.DropEvent
    return line


class _Part:
    """Stands for the logger of one part until its first line."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        import structlog

        return getattr(structlog.get_logger(part=self._name), method)


def get(name: str) -> Logger:
    """The logger of one part of the worker."""
    return cast("Logger", _Part(name))


class Throttle:
    """Lets one line through every `interval_s`, over all threads, and says in it how many it held back before."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._next = 0.0
        self._held = 0

    def write(self, write: Callable[..., object], event: str, /, **fields: object) -> None:
        """Call `write`, a method of a logger, with this line, or hold it back."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._held += 1
                return
            held, self._held, self._next = self._held, 0, now + self._interval_s
        write(event, held_back=held, **fields)


def message_of(record: logging.LogRecord) -> str:
    """What a library says; its words alone where the values do not fit them, or of what has no words the kind.

    The mistake is not its caller's to pay for.
    """
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001  logging's own handlers let no such error out either
        return record.msg if isinstance(record.msg, str) else type(record.msg).__name__


_log = get("python")


class _Library(logging.Handler):
    """What a library logs as a warning or worse. A name and a place; its message may quote what a job asks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._throttle = Throttle()

    def emit(self, record: logging.LogRecord) -> None:
        place = f"{record.pathname}:{record.lineno}"
        text = private(text=message_of(record))
        self._throttle.write(_log.warning, "library_said", library=record.name, place=place, **text)


def _note_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    _log.warning("python_warning", kind=category.__name__, place=f"{filename}:{lineno}", **private(text=str(message)))


def _note_dead_thread(args: threading.ExceptHookArgs) -> None:
    _log.error("thread_died", thread=args.thread.name if args.thread else "", exc_info=True)
