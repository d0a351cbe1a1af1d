"""One line of a batch file: OpenAI's request as a job body, and a job's result as OpenAI's response.

Pure: no files, no connection. Relies on `wire` for what a job may hold. Leaves reading to `source`, and which lines are done to
`plan`.
A job of a batch carries in its `metadata` the line's number, `custom_id` and endpoint, so that a result alone makes its line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.frames import Result

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class Rules:
    """How lines are read, beside what they say themselves; part of what a resumed batch must have in common with its start."""

    ignore_model: bool = False
    """Lines may name any model: whoever serves the queue answers."""
    max_tokens: int = 1024
    """For lines that give no limit."""
    prompt_column: str | None = None
    """Of a CSV or Parquet file, whose other columns stay unused."""
    id_column: str | None = None
    """None: `row-<number>`."""
    system: str | None = None
    """System message before each prompt of a column."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """OpenAI's request fields (temperature, ...) for prompts of a column."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request that can be served, as far as its line tells."""

    number: int
    """Of its line, or row, from 1."""
    custom_id: str
    endpoint: str
    body: Mapping[str, Any]
    """Fields of a job (docs/protocol.md) without `id` and `batch_id`; `metadata` names the line, `stream` is false."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be served. `code`, `message` and `param` as in OpenAI's `BatchError`."""

    number: int
    code: str
    message: str
    """Field, value, limit, remedy in one line; never prompt text."""
    param: str | None = None
    custom_id: str | None = None
    """Where the line has a usable one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line of the output file, or with `is_error` of the error file."""

    number: int
    custom_id: str | None
    is_error: bool
    record: Mapping[str, Any]
    """The line as OpenAI writes it: id, custom_id, response {status_code, request_id, body} or null, error {code, message} or
    null."""


def parse_line(number: int, record: bytes | Mapping[str, Any], rules: Rules) -> BatchLine | BadLine:
    """A line of a JSONL file, or a row (column -> value) of a table, as a request."""
    raise NotImplementedError


def outcome_of(result: Result) -> Outcome:
    """The line that a job's result makes. 200 in the output file; 4xx and 5xx, expired and cancelled in the error file."""
    raise NotImplementedError


def refusal_of(bad: BadLine) -> Outcome:
    """The error line of a request that was never made: status 400."""
    raise NotImplementedError
