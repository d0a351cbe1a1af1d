"""What the queue side refuses or fails with.

SlotmillError
├── InvalidJob         a job that cannot be accepted: field, value, limit; becomes a final result with code `invalid`
│   └── UnknownVersion     an unknown major `v`; goes to `dead`
├── InvalidOption      an option of the worker or the command line that cannot work; exit code 2
├── UnknownJob         no such job on this queue (never there, or its result has expired)
├── JobFailed          a job that was waited for did not succeed; carries its `result`
├── TextChanged        a text iterator gave what a later attempt has answered otherwise
├── QueueFull          the bounded queue takes no more for now; carries `retry_after_s`
│   └── QueueClosed        it takes none until it is reopened: it is being drained
├── ProtocolError      a frame or result that this version cannot read
├── ServerUnavailable  no usable Redis server; exit code 5
├── EngineUnavailable  the engine did not start or is gone; exit code 6
└── WaitTimeout        a wait ended before the job did; carries its `state`; exit code 4
"""

from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from worker.frames import Result


class SlotmillError(Exception):
    """Base of all errors raised by the queue side and the client."""


class InvalidJob(SlotmillError):
    """A refused job. `value` is cut to 64 characters and never holds prompt text."""

    code = "invalid"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = str(value)
        self.field = field
        self.value = shown if len(shown) <= 64 else shown[:61] + "..."
        self.limit = limit
        self.job_id: str | None = None
        self.traceparent: str | None = None
        super().__init__(f"{field}: {self.value}: {limit}")


class UnknownVersion(InvalidJob):
    """A job body of a major version that this worker does not speak."""

    code = "unknown_version"


class InvalidOption(SlotmillError):
    """Options have values that cannot work; `problems` says of each one option, value, limit, remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Problems:
    """A `with` block for each thing that options are checked for, and then `tell`: all that is wrong at once.

    A block that fails leaves its names as they were, so give them a stand-in that works before it.
    """

    def __init__(self) -> None:
        self._found: list[str] = []

    def __enter__(self) -> None:
        """Go on after this block whichever option it refuses."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, InvalidOption | ConfigError):
            return False
        self._found += error.problems
        return True

    def tell(self) -> None:
        """`InvalidOption` with what was found, if anything was."""
        if self._found:
            raise InvalidOption(*self._found)


class UnknownJob(SlotmillError):
    """No such job on this queue."""

    code = "unknown_job"


class JobFailed(SlotmillError):
    """A job ended in another state than `succeeded`. `result` has what it came to, with the text so far."""

    def __init__(self, result: "Result") -> None:
        why = ": ".join(part for part in (result.code, result.error) if part)
        super().__init__(f"job {result.id}: {result.state}" + (f": {why}" if why else ""))
        self.result = result
        self.state = result.state
        self.code = result.code


class TextChanged(SlotmillError):
    """Text that a text iterator gave is void, and it cannot take it back."""


class QueueFull(SlotmillError):
    """The queue is at its bound."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueClosed(QueueFull):
    """The queue is being drained; nobody knows until when."""


class ProtocolError(SlotmillError):
    """A frame or a result that is not as docs/protocol.md says, or of another major version."""


class ServerUnavailable(SlotmillError):
    """No usable Redis server; the message says what was tried and how to mend it."""


class EngineUnavailable(SlotmillError):
    """The engine process did not start or is gone."""


class WaitTimeout(SlotmillError):
    """A wait ended before what it waited for. `state` is that of the job by then, None where it was not for one job."""

    def __init__(self, message: str, state: str | None = None) -> None:
        super().__init__(message)
        self.state = state
