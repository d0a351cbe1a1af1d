"""`worker batch verify`: whether output and errors answer each line of the input once, and nothing else.

Relies on the plan for the input, on `output` for what a written line is. Writes nothing.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from worker.batch.lines import Rules
from worker.batch.options import FileOptions, column_options, errors_beside, input_option, take_options
from worker.batch.output import number_in, read_line, read_record, record_path
from worker.batch.plan import BAD, TODO, Plan
from worker.command import FAILED, Command, note, option, say
from worker.errors import InvalidOption
from worker.progress import Progress

SHOWN = 20
"""Lines of a kind that are told; the others are counted."""
KINDS = {
    "missing": "not answered; --resume goes on with it",
    "doubled": "answered more than once",
    "unknown": "answers a line that the input does not have",
    "unreadable": "torn, or no line of a batch",
}


@dataclass
class Findings:
    """What is amiss: (file, line) of each kind, in the order found."""

    lines: int = 0
    answers: int = 0
    errors: int = 0
    notes: list[str] = field(default_factory=list)
    """What is amiss with the files as a whole."""
    wrong: dict[str, list[tuple[Path, int]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    @property
    def is_well(self) -> bool:
        """Each line is answered once."""
        return not self.notes and not any(self.wrong.values())


@click.command(
    cls=Command,
    short_help="Check that each line was answered once.",
    examples=["worker batch verify -i in.jsonl -o out.jsonl"],
)
@input_option
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File of the answers.")
@click.option("--errors", type=click.Path(path_type=Path), help="File of the errors. Default: as for the call that wrote it.")
@column_options
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(*, as_json: bool, **given: Any) -> None:
    """Check that each custom_id of the input stands once in output and errors together; 1 when one does not."""
    found = check(take_options(given))
    if as_json:
        say(json.dumps(_data(found)))
    else:
        _tell(found)
    if not found.is_well:
        raise click.exceptions.Exit(FAILED)


def check(options: FileOptions) -> Findings:
    """Read all files once."""
    assert options.output is not None
    found, record = Findings(), _record(options.output)
    written = [options.output]
    errors = options.errors or (options.output.parent / record["errors"] if record else errors_beside(options.output))
    if errors.exists() and not errors.samefile(options.output):
        written.append(errors)
    with Progress("verifying", "B") as progress, Plan(options.input, _rules(options.rules, record), progress.update) as plan:
        if record and record["fingerprint"] != plan.fingerprint:
            found.notes.append(f"{options.output}: belongs to another input, {record.get('input')}, or an earlier state of it")
        size, done = sum(path.stat().st_size for path in written), 0
        for path, number, line in _lines(written):
            _judge(plan, found, path, number, line)
            progress.update(done := done + len(line), size)
        found.lines = plan.num_lines
        found.wrong["missing"] = [(plan.path, n) for n in range(plan.last + 1) if plan.state_of(n) in (TODO, BAD)]
    return found


def _judge(plan: Plan, found: Findings, path: Path, number: int, line: bytes) -> None:
    record = read_line(line) if line.endswith(b"\n") else None
    if record is None:
        found.wrong["unreadable"].append((path, number))
        return
    is_answer = (record["response"] or {}).get("status_code") == 200
    found.answers += is_answer
    found.errors += not is_answer
    answered = number_in(plan, record)
    if answered is None:
        found.wrong["unknown"].append((path, number))
    elif not plan.mark_done(answered):
        found.wrong["doubled"].append((path, number))


def _lines(paths: list[Path]) -> Iterator[tuple[Path, int, bytes]]:
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield path, number, line


def _record(output: Path) -> dict[str, Any]:
    if not output.is_file():
        raise InvalidOption(f"--output: {output}: is no file; give the one that was written")
    try:
        return read_record(record_path(output))
    except (OSError, ValueError):  # the files say all that counts
        return {}


def _rules(given: Rules, record: dict[str, Any]) -> Rules:
    """The columns are those that the output was made with, unless they are given."""
    known = record.get("parameters", {}).get("rules", {})
    columns = {name: getattr(given, name) or known.get(name) for name in ("prompt_column", "id_column")}
    return replace(given, **columns)


def _tell(found: Findings) -> None:
    for line in found.notes:
        note(line)
    for kind, wrong in found.wrong.items():
        for path, number in wrong[:SHOWN]:
            note(f"{path}, line {number}: {KINDS[kind]}")
        if len(wrong) > SHOWN:
            note(f"{len(wrong) - SHOWN} more lines are {kind}")
    counts = ", ".join(f"{len(wrong)} {kind}" for kind, wrong in found.wrong.items() if wrong)
    say(f"{found.lines} lines: {found.answers} answers, {found.errors} errors, {counts or 'each line once'}")


def _data(found: Findings) -> dict[str, Any]:
    wrong = {kind: [{"file": str(path), "line": number} for path, number in wrong] for kind, wrong in found.wrong.items()}
    counts = {"lines": found.lines, "answers": found.answers, "errors": found.errors}
    return {"is_well": found.is_well, **counts, "notes": found.notes, **wrong}
