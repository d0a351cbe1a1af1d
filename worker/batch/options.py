"""What the commands of `worker batch` share: the options about files and lines, and how plan and output are opened from them.

Relies on `plan` and `output`. Leaves to each command what becomes of the lines. stdout is left alone.
"""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click

from worker.batch.lines import BadLine, Rules
from worker.batch.output import BatchOutput, Order
from worker.batch.plan import Plan
from worker.command import CANCELLED, FAILED, OK, fail, note, option, plain
from worker.errors import InvalidOption
from worker.progress import Progress

F = TypeVar("F", bound=Callable[..., Any])

SHOWN_BAD = 20
"""Bad lines that are told; the others are counted."""
NO_JSON = "each line is a JSON object with custom_id, method, url and body; bare prompts go into a .csv, with --prompt-column"
COLUMN_FIELDS = ("temperature", "top_p", "seed")
"""Options that are fields of the requests which the prompts of a column make."""

_RULES = ("ignore_model", "max_tokens", "prompt_column", "id_column", "system")
_FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class FileOptions:
    """The shared options of one call."""

    input: Path
    output: Path | None
    errors: Path | None
    """None: beside the output."""
    order: Order
    resume: bool
    force: bool
    retry_failed: bool
    strict: bool
    rules: Rules = field(default_factory=Rules)

    @property
    def errors_path(self) -> Path:
        """Where error lines go."""
        assert self.output is not None
        return self.errors or errors_beside(self.output)


def input_option(function: F) -> F:
    """`-i`."""
    return click.option("-i", "--input", "input_path", type=_FILE, required=True, help="JSONL, CSV or Parquet file.")(function)


def output_options(*, required: bool) -> Callable[[F], F]:
    """Where answers and errors go, in which order, and whether the files are there already."""

    def add(function: F) -> F:
        for wrap in reversed(
            (
                click.option("-o", "--output", type=_FILE, required=required, help="File of the answers, as JSON lines."),
                click.option(
                    "--errors", type=_FILE, help="File of the errors; may be the output. Default: OUT.errors.jsonl beside it."
                ),
                option("--order", type=click.Choice(["done", "input"]), default="done", help="Order of the lines written."),
                click.option("--resume", is_flag=True, help="Go on with files of an earlier call; what is done stays."),
                click.option("--force", is_flag=True, help="With --resume: although input or parameters are others by now."),
                click.option("--retry-failed", is_flag=True, help="With --resume: run again what failed; refused lines stay."),
            )
        ):
            function = wrap(function)
        return function

    return add


def column_options(function: F) -> F:
    """Which columns of a table hold what."""
    function = click.option("--id-column", help="Column of the custom_ids of a CSV or Parquet file. Default: row-N.")(function)
    return click.option("--prompt-column", help="Column of the prompts of a CSV or Parquet file, each a user's message.")(
        function
    )


def line_options(function: F) -> F:
    """How lines are read."""
    for wrap in reversed(
        (
            click.option("--strict", is_flag=True, help="Do nothing when a line is bad. Default: it becomes an error line."),
            click.option("--ignore-model", is_flag=True, help="Take no notice of the models that lines name."),
            option("--max-tokens", type=int, default=1024, help="Most tokens of an answer, for lines that do not say."),
            column_options,
            click.option("--system", help="System message before each prompt of a column."),
            click.option("--temperature", type=float, help="For prompts of a column. Default: 1."),
            click.option("--top-p", type=float, help="For prompts of a column. Default: 1."),
            click.option("--seed", type=int, help="For prompts of a column. Default: a new one for each."),
        )
    ):
        function = wrap(function)
    return function


def take_options(given: dict[str, Any]) -> FileOptions:
    """Take the shared options out of what click passed to a command; those that the command does not have are at rest."""
    paths = {"input": given.pop("input_path"), "output": given.pop("output", None), "errors": given.pop("errors", None)}
    flags: dict[str, Any] = {name: given.pop(name, False) for name in ("resume", "force", "retry_failed", "strict")}
    for name in ("force", "retry_failed"):
        if flags[name] and not flags["resume"]:
            option = f"--{name.replace('_', '-')}"
            raise InvalidOption(f"{option}: only goes on with what is there; give --resume too, or write to another file")
    if paths["errors"] is not None and paths["output"] is None:
        raise InvalidOption("--errors: needs --output")
    fields = {name: given.pop(name, None) for name in COLUMN_FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    rules = Rules(**{name: given.pop(name) for name in _RULES if name in given}, fields=fields)
    only_columns = ["--system"] * bool(rules.system) + [f"--{name.replace('_', '-')}" for name in fields]
    if only_columns and rules.prompt_column is None:
        raise InvalidOption(f"{only_columns[0]}: is for prompts of a column; lines of a JSONL file say it themselves")
    return FileOptions(**paths, **flags, order=given.pop("order", "done"), rules=rules)


@contextmanager
def open_plan(options: FileOptions, served_name: str | None = None) -> Iterator[Plan]:
    """The input, checked, and what is wrong with it told. Leaves with 2 when nothing is to run.

    Until the end SIGTERM is Ctrl-C. `served_name` makes lines that name another model bad.
    """
    rules = replace(options.rules, served_name=None if options.rules.ignore_model else served_name)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Progress(f"reading {options.input.name}", "B") as progress:
            plan = Plan(options.input, rules, progress.update)
        with plan:
            _check(plan, options)
            yield plan
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def open_output(plan: Plan, options: FileOptions, parameters: Mapping[str, Any]) -> Iterator[BatchOutput]:
    """The files of a command that has an output. Ctrl-C leaves with 3 and says how to go on.

    `parameters` are what changes answers beside the rules of lines: model, engine, seed; with others a batch is not resumed.
    """
    assert options.output is not None
    how: dict[str, Any] = {"order": options.order, "resume": options.resume, "force": options.force}
    how["retry_failed"] = options.retry_failed
    parameters = {"rules": asdict(options.rules), **parameters}
    num_done = 0
    try:
        with BatchOutput(plan, options.input, options.output, options.errors_path, parameters, **how) as output:
            if output.num_dropped:
                note(f"batch: {output.num_dropped} lines of earlier calls were torn or refused under other rules; done again")
            if output.num_retried:
                note(f"batch: {output.num_retried} lines had failed; done again")
            try:
                yield output
            finally:
                num_done = output.num_answers + output.num_errors
    except KeyboardInterrupt:
        fail(f"cancelled: {num_done} of {plan.num_lines} lines are done; the same command with --resume goes on", CANCELLED)


def tell_end(output: BatchOutput, options: FileOptions) -> int:
    """Say what was written where; the exit code."""
    errors = f", {output.num_errors} errors in {options.errors_path}" if output.num_errors else ""
    note(f"batch: {output.num_answers} answers in {options.output}{errors}")
    if output.first_failure is not None:
        error = output.first_failure.record["error"] or output.first_failure.record["response"]["body"]["error"]
        note(f"batch: line {output.first_failure.number} failed first: {plain(error['message'])}")
    return FAILED if output.num_errors else OK


def errors_beside(output: Path) -> Path:
    """The error file of an output that has none named."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def _check(plan: Plan, options: FileOptions) -> None:
    if not plan.num_lines:
        raise InvalidOption(f"--input: {options.input}: no line in it; give it one request a line")
    num_bad = plan.num_lines - plan.num_good
    if not plan.num_good and len(reasons := _reasons(plan)) == 1:
        (reason,) = reasons
        hint = f"; {NO_JSON}" if reason.startswith("invalid_json_line") and options.rules.prompt_column is None else ""
        raise InvalidOption(f"--input: {options.input}: none of its {num_bad} lines can be served: {plain(reason)}{hint}")
    for bad in islice(plan.bad(), SHOWN_BAD):
        note(f"{options.input}, line {bad.number}: {plain(_reason(bad))}")
    if num_bad > SHOWN_BAD:
        note(f"{options.input}: {num_bad - SHOWN_BAD} more lines are bad")
    if not plan.num_good:
        raise InvalidOption(f"--input: {options.input}: none of its {num_bad} lines can be served")
    if num_bad and options.strict:
        raise InvalidOption(f"--strict: {num_bad} of {plan.num_lines} lines are bad; nothing was done")


def _reasons(plan: Plan) -> set[str]:
    """Of bad lines: one, or two of several."""
    found: set[str] = set()
    for bad in plan.bad():
        found.add(_reason(bad))
        if len(found) > 1:
            break
    return found


def _reason(bad: BadLine) -> str:
    return f"{bad.code}: {bad.message}"
