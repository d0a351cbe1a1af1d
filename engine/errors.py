"""What the engine refuses or fails with.

EngineError
├── RequestRefused     one request cannot be served; names field, value, limit and remedy
├── ModelUnsupported   this model cannot be served correctly; refused at start
├── OutOfMemory        model and cache do not fit; carries the sizes that would
└── ConfigError        an option has a value that cannot work
"""

import textwrap


class EngineError(Exception):
    """Base of all errors raised by the engine."""


class RequestRefused(EngineError):
    """One request that can never be served, refused before it takes anything."""

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        super().__init__(f"{field}: {value} is over the limit: {limit}; {remedy}")
        self.field = field
        self.value = value
        self.limit = limit
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[str, object, str, str]]:
        return RequestRefused, (self.field, self.value, self.limit, self.remedy)


class ModelUnsupported(EngineError):
    """The model would answer wrongly or not at all; the message says why."""


class OutOfMemory(EngineError):
    """Weights or cache do not fit; the message carries the memory table."""


class ConfigError(EngineError):
    """An engine option has a value that cannot work: field, value, limit, remedy."""


def one_line(error: BaseException) -> str:
    """Kind and beginning of a library's error, on one line, to go into a message of ours."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 240, placeholder=' ...')}"
