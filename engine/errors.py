"""What the engine refuses or fails with.

EngineError
├── RequestRefused     one request cannot be served; names field, value, limit and remedy
│   └── GrammarError   a grammar cannot be compiled, or not be met by the output so far
├── ModelUnsupported   this model cannot be served correctly; refused at start
├── OutOfMemory        model and cache do not fit; carries the sizes that would
└── ConfigError        an option has a value that cannot work
"""

import textwrap


class EngineError(Exception):
    """Base of all errors raised by the engine."""


class RequestRefused(EngineError):
    """One request that can never be served, refused before it takes anything."""

    _relation = "is over the limit:"

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        super().__init__(f"{field}: {value} {self._relation} {limit}; {remedy}")
        self.field = field
        self.value = value
        self.limit = limit
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return RequestRefused, (self.field, self.value, self.limit, self.remedy)


class GrammarError(RequestRefused):
    """A grammar that cannot be compiled, which refuses the request; or that the output so far does not meet, which fails it."""

    _relation = "does not work:"

    def __init__(self, value: object, limit: str, remedy: str) -> None:
        super().__init__("response_format", value, limit, remedy)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return GrammarError, (self.value, self.limit, self.remedy)


class ModelUnsupported(EngineError):
    """The model would answer wrongly or not at all; the message says why."""


class OutOfMemory(EngineError):
    """Weights or cache do not fit; the message carries the memory table."""


class ConfigError(EngineError):
    """Engine options have values that cannot work; `problems` says of each one field, value, limit, remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def one_line(error: BaseException) -> str:
    """Kind and beginning of a library's error, on one line, to go into a message of ours."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 240, placeholder=' ...')}"
