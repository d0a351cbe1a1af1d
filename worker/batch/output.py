"""The files a batch writes: answers, errors, and beside them a record of what they belong to.

1. A line is written whole, to a file that only one process holds (a lock), and is on the disk within a second.
2. The files are the truth of what is done: resuming reads them, cuts off a torn last line, marks their custom_ids in the plan.
3. With order "input" an outcome waits here until all lines before it are written; the caller bounds how many wait.
4. The record is there before the first line is.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from worker.batch.appended import AppendedFile, replace_file
from worker.batch.lines import REFUSAL_PREFIX, Outcome, refusal_of
from worker.batch.plan import BAD, TODO, Plan
from worker.errors import InvalidOption

Order = Literal["done", "input"]

RECORD_SUFFIX = ".batch.json"
VERSION = 1
SHOWN_CHARS = 60


class BatchOutput:
    """Use as a context manager; leaving syncs."""

    num_answers: int
    num_errors: int
    """Lines in the files, those of earlier runs included."""
    num_dropped: int
    """Lines of earlier runs that could not be read, or were refused under other rules; they are done again."""
    num_retried: int
    """Lines of earlier runs that had failed, and are done again on request."""
    record: dict[str, Any]
    """What `<out>.batch.json` holds; a road may keep its batch id in it (`remember`)."""

    def __init__(
        self,
        plan: Plan,
        input_path: Path,
        out: Path,
        errors: Path,
        parameters: Mapping[str, Any],
        *,
        order: Order = "done",
        resume: bool = False,
        force: bool = False,
        retry_failed: bool = False,
    ) -> None:
        """`errors` may equal `out`. Bad lines of the plan are written as error lines at once. With `retry_failed` the error
        lines of earlier runs go, but for those of requests that were refused.

        `InvalidOption` when out or errors is the input, when a file exists and `resume` is false, when it belongs to another
        input or other parameters and `force` is false, when another process writes it.
        """
        self._plan = plan
        self._is_ordered = order == "input"
        self._is_new = not resume
        self._retries = retry_failed
        self._waiting: dict[int, Outcome] = {}
        self._next = 1
        self.num_answers = self.num_errors = self.num_dropped = self.num_retried = 0
        self.first_failure: Outcome | None = None
        _check_paths(input_path, out, errors)
        with ExitStack() as opened:
            self._out = opened.enter_context(AppendedFile(out, "--output", is_new=not resume))
            self._errors = self._out
            if not _same(out, errors):
                self._errors = opened.enter_context(AppendedFile(errors, "--errors", is_new=not resume))
            self._record_path = record_path(out)
            self._begin(plan, input_path, errors, parameters, resume=resume, force=force)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with suppress(*(() if error is None else (Exception,))):  # the first error says what went wrong
                self.sync()
        finally:
            if error is not None and self._is_new and not self._out.size and not self._errors.size:  # it goes with its files
                self._record_path.unlink(missing_ok=True)
            self._opened.__exit__(kind, error, trace)

    def remember(self, **facts: Any) -> None:
        """Add to the record, on disk before this returns."""
        self.record |= facts
        replace_file(self._record_path, json.dumps(self.record, indent=2).encode() + b"\n")

    def write(self, outcome: Outcome) -> bool:
        """Append its line, or keep it until its turn; False for a line that is done already. Marks it in the plan."""
        if not self._plan.mark_done(outcome.number):
            return False
        if outcome.is_error and self.first_failure is None:
            self.first_failure = outcome
        if self._is_ordered:
            self._waiting[outcome.number] = outcome
            self._write_turns()
        else:
            self._append(outcome)
        return True

    def sync(self) -> int:
        """Put on the disk what was written; each second that is done anyway. How many outcomes wait for their turn."""
        for file in {self._out, self._errors}:
            file.sync()
        return len(self._waiting)

    def _begin(
        self, plan: Plan, input_path: Path, errors: Path, parameters: Mapping[str, Any], *, resume: bool, force: bool
    ) -> None:
        wanted = {
            "v": VERSION,
            "fingerprint": plan.fingerprint,
            "parameters": json.loads(json.dumps(dict(parameters))),
            "errors": os.path.relpath(os.path.realpath(errors), os.path.realpath(self._record_path.parent)),
        }
        found = self._found() if resume else {}
        differs = _difference(found, wanted, is_written=bool(self._out.size or self._errors.size))
        if differs and not force:
            raise InvalidOption(f"--resume: {self._record_path}: {differs}, or go on all the same with --force")
        for file in {self._out, self._errors}:
            self.num_dropped += file.recover(lambda line: self._take(line, keep_refusals=not differs))
        self.num_dropped -= self.num_retried
        self.record = {} if differs else found
        self.remember(input=str(input_path), **wanted)
        if self._is_ordered:
            self._write_turns()
        else:
            for bad in plan.bad():
                if self._plan.mark_done(bad.number):
                    self._append(refusal_of(bad))

    def _found(self) -> dict[str, Any]:
        try:
            return read_record(self._record_path)
        except FileNotFoundError:
            return {}
        except ValueError:
            return {"v": None}

    def _take(self, line: bytes, *, keep_refusals: bool) -> bool:
        """Count a line of an earlier run and mark what it answers; whether it stays."""
        record = read_line(line)
        if record is None or (not keep_refusals and record["id"].startswith(REFUSAL_PREFIX)):
            return False
        if self._retries and may_be_retried(record):
            self.num_retried += 1
            return False
        if (number := number_in(self._plan, record)) is not None:
            self._plan.mark_done(number)
        is_answer = (record["response"] or {}).get("status_code") == 200
        self.num_answers += is_answer
        self.num_errors += not is_answer
        return True

    def _write_turns(self) -> None:
        """All that stand in a row from the next one on. A line that is done and does not wait was written by an earlier run."""
        while self._next <= self._plan.last:
            state = self._plan.state_of(self._next)
            if state == TODO:
                return
            if self._next in self._waiting:
                self._append(self._waiting.pop(self._next))
            elif state == BAD:
                self._plan.mark_done(self._next)
                self._append(refusal_of(self._plan.bad_line(self._next)))
            self._next += 1

    def _append(self, outcome: Outcome) -> None:
        line = json.dumps(outcome.record, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
        (self._errors if outcome.is_error else self._out).append(line)
        self.num_answers += not outcome.is_error
        self.num_errors += outcome.is_error


def _check_paths(input_path: Path, out: Path, errors: Path) -> None:
    for option, path in (("--output", out), ("--errors", errors), ("--output", record_path(out))):
        if _same(path, input_path):
            raise InvalidOption(f"{option}: {path}: is the input; write to another file")
    if _same(errors, record_path(out)):
        raise InvalidOption(f"--errors: {errors}: holds the record of {out}; write to another file")
    if record_path(out).is_dir():
        raise InvalidOption(f"--output: {out}: its record, {record_path(out)}, is a directory; write to another file")


def record_path(out: Path) -> Path:
    """Where the record of an output file is."""
    return out.with_name(out.name + RECORD_SUFFIX)


def read_record(path: Path) -> dict[str, Any]:
    """A record as it was written. `ValueError` for anything else, `OSError`."""
    record: dict[str, Any] = json.loads(path.read_bytes())
    is_ours = type(record) is dict and record.get("v") == VERSION
    if not is_ours or [type(record.get(name)) for name in ("fingerprint", "errors", "parameters")] != [str, str, dict]:
        raise ValueError("not a record of this version")
    return record


def read_line(line: bytes) -> dict[str, Any] | None:
    """A line that `BatchOutput` wrote; None for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = (
        type(record) is dict
        and type(record.get("id")) is str
        and type(record.get("custom_id", 0)) in (str, type(None))
        and type(record.get("response", 0)) in (dict, type(None))
    )
    return record if is_ours else None


def may_be_retried(record: Mapping[str, Any]) -> bool:
    """Whether a line tells of a request that failed, and was not refused for what it asked."""
    response = record["response"]
    return response is None or not 200 <= response.get("status_code", 0) < 500


def number_in(plan: Plan, record: Mapping[str, Any]) -> int | None:
    """The line of the plan that a record answers: by its custom_id, or of a refusal without one by the line's number."""
    if record["custom_id"] is not None:
        return plan.number_of(record["custom_id"])
    digits = record["id"].removeprefix(REFUSAL_PREFIX)
    number = int(digits) if record["id"].startswith(REFUSAL_PREFIX) and digits.isascii() and digits.isdigit() else 0
    return number if plan.state_of(number) >= BAD else None


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any], *, is_written: bool) -> str | None:
    """What keeps a batch from going on with what `found` is the record of, and the remedy."""
    if not found:
        return "missing, so that nobody knows what the output belongs to; write to another file" if is_written else None
    if found.get("v") != VERSION:
        return "not a record that this version can read; write to another file"
    if found.get("fingerprint") != wanted["fingerprint"]:
        return f"its input was another one, {found.get('input')}; give that one"
    if found.get("errors") != wanted["errors"]:
        return f"its errors are in {found.get('errors')}; give --errors as before"
    before, now = _flat(found.get("parameters") or {}), _flat(wanted["parameters"])
    changed = sorted(name for name in {**before, **now} if before.get(name) != now.get(name))
    shown = "; ".join(f"{name}: {_short(before.get(name))}, not {_short(now.get(name))}" for name in changed)
    return f"begun with other parameters ({shown}); give those" if changed else None


def _flat(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by the names that users give them; how lines are read is a map, and fields of rows are one within."""
    flat: dict[str, Any] = {}
    for name, value in parameters.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.realpath(one) == os.path.realpath(other) or one.samefile(other)
    except OSError:
        return False
