"""One line of a batch file: OpenAI's request as a job body, and a job's result as OpenAI's response.

Pure: no files, no connection. Relies on `fields` for what a request may ask, on `answers` for what it is answered. Leaves
reading to `source`, and which lines are done to `plan`.
A job of a batch carries in its `metadata` the line's number, `custom_id` and endpoint, so that a result alone makes its line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker import codec
from worker.batch.answers import answer_body, error_body, status_of
from worker.batch.fields import CHAT, COMPLETIONS, RefusedError, check_job, job_fields, shown
from worker.errors import InvalidJob, ProtocolError
from worker.frames import Result
from worker.wire import MAX_BODY_BYTES, encode_body

ENDPOINTS = (CHAT, COMPLETIONS)
MAX_CUSTOM_ID_CHARS = 512
"""OpenAI's limit, and that of a job's `custom_id`."""
ID_PREFIX = "batch_req_"
REFUSAL_PREFIX = "batch_req_line-"
"""Of the ids of error lines whose request was never made, before the number of its line."""
SURELY_FITS = MAX_BODY_BYTES - (64 << 10)
"""Bytes of a line whose body cannot be too large: msgpack is shorter than JSON, but for a few numbers and the metadata."""

_CUSTOM_ID = f"text of 1 to {MAX_CUSTOM_ID_CHARS} characters, in quotes"
_NEVER_RAN = {"expired": "batch_expired", "cancelled": "batch_cancelled"}


@dataclass(frozen=True, slots=True)
class Rules:
    """How lines are read, beside what they say themselves; part of what a resumed batch must have in common with its start."""

    ignore_model: bool = False
    """Lines may name any model: whoever serves the queue answers."""
    max_tokens: int = 1024
    """For lines that give no limit."""
    served_name: str | None = None
    """What the model is called, where that is known beforehand: a line that names another is bad."""
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
    custom_id = None
    try:
        line = _read(record) if isinstance(record, bytes) else _row(number, record, rules)
        custom_id = _custom_id(line)
        endpoint, request = _request(line)
        fields = job_fields(endpoint, request, rules.max_tokens)
        body = fields | {
            "custom_id": custom_id,
            "metadata": {"custom_id": custom_id, "endpoint": endpoint, "line": number},
            "stream": False,
        }
        check_job(body, request)
        _check_model(body, rules)
        if not isinstance(record, bytes) or len(record) > SURELY_FITS:
            encode_body(body)
    except RefusedError as error:
        return BadLine(number, error.code, str(error), error.param, custom_id)
    except codec.MalformedError as error:
        return BadLine(number, "invalid_json_line", f"line: {error}", None, custom_id)
    except InvalidJob as error:
        return BadLine(number, "invalid_value", str(error), error.field, custom_id)
    return BatchLine(number, custom_id, endpoint, body)


def outcome_of(result: Result) -> Outcome:
    """The line that a job's result makes. 200 in the output file; 4xx and 5xx, expired and cancelled in the error file."""
    custom_id, line, endpoint = (result.metadata.get(name) for name in ("custom_id", "line", "endpoint"))
    if type(custom_id) is not str or type(line) is not int or endpoint not in ENDPOINTS:
        raise ProtocolError(f"job {result.id}: its metadata names no line of a batch; it was not added by one")
    ended = _NEVER_RAN.get(result.state)
    response = None if ended else _response(result, endpoint)
    error = None if ended is None else {"code": ended, "message": f"job {result.id}: {result.error or result.state}"}
    record = {"id": f"{ID_PREFIX}{result.id}", "custom_id": custom_id, "response": response, "error": error}
    return Outcome(line, custom_id, result.state != "succeeded", record)


def refusal_of(bad: BadLine) -> Outcome:
    """The error line of a request that was never made: status 400, or 404 for a model that is not served."""
    record_id, status = f"{REFUSAL_PREFIX}{bad.number}", 404 if bad.code == "model_not_found" else 400
    body = error_body(bad.message, bad.code, bad.param, status)
    response = {"status_code": status, "request_id": record_id, "body": body}
    record = {"id": record_id, "custom_id": bad.custom_id, "response": response, "error": None}
    return Outcome(bad.number, bad.custom_id, True, record)


def _response(result: Result, endpoint: str) -> dict[str, Any]:
    status = status_of(result)
    body = (
        answer_body(result, endpoint)
        if status == 200
        else error_body(result.error or f"job {result.id}: {result.state}", result.code or result.state, None, status)
    )
    return {"status_code": status, "request_id": result.id, "body": body}


def _read(record: bytes) -> dict[str, Any]:
    if len(record) > MAX_BODY_BYTES:
        raise codec.MalformedError(f"more than {MAX_BODY_BYTES} bytes; shorten the prompt")
    line = codec.parse_json(record)
    if type(line) is not dict:
        raise codec.MalformedError("must be a map {custom_id, method, url, body}")
    return line


def _row(number: int, row: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """The line that a row stands for."""
    column = rules.prompt_column or ""
    prompt = row.get(column)
    if problem := _prompt_problem(row, prompt):
        raise RefusedError("invalid_value", shown(column), problem)
    custom_id = f"row-{number}" if rules.id_column is None else row.get(rules.id_column)
    if type(custom_id) is int:
        custom_id = str(custom_id)
    system = [{"role": "system", "content": rules.system}] if rules.system else []
    request = {**rules.fields, "messages": [*system, {"role": "user", "content": prompt}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": request}


def _prompt_problem(row: Mapping[str, Any], prompt: object) -> str | None:
    if not row:
        return "the row has more cells than the header; put those that hold a separator in quotes"
    if type(prompt) is not str or not prompt:
        return f"{'empty' if prompt in (None, '') else type(prompt).__name__}; each row needs a text there"
    if codec.has_lone_surrogate(prompt):
        return "text with a lone surrogate, as of a file that is not UTF-8; save it as UTF-8"
    return None


def _custom_id(line: Mapping[str, Any]) -> str:
    custom_id = line.get("custom_id")
    if custom_id is None:
        raise RefusedError("missing_required_parameter", "custom_id", f"missing; give each line one, {_CUSTOM_ID}")
    if type(custom_id) is not str or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS or codec.has_lone_surrogate(custom_id):
        found = f"{len(custom_id)} characters" if type(custom_id) is str else type(custom_id).__name__
        raise RefusedError("invalid_value", "custom_id", f"{found}: must be {_CUSTOM_ID}")
    return custom_id


def _request(line: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    method, url, request = (line.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        raise RefusedError("invalid_method", "method", "must be POST")
    if url not in ENDPOINTS:
        given = f"{shown(url)}: " if type(url) is str else ""
        raise RefusedError("invalid_url", "url", f"{given}must be one of {', '.join(ENDPOINTS)}")
    if type(request) is not dict:
        raise RefusedError("missing_required_parameter", "body", "must be a map, the request to the endpoint")
    return url, request


def _check_model(body: dict[str, Any], rules: Rules) -> None:
    if rules.ignore_model:
        body.pop("model", None)
    elif rules.served_name is not None and body.get("model", rules.served_name) != rules.served_name:
        served = f"{shown(body['model'])}: served is {shown(rules.served_name)}"
        raise RefusedError(
            "model_not_found", "model", f"{served}; give --model or --served-name as the lines have it, or --ignore-model"
        )
