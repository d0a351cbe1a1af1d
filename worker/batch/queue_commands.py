"""`worker batch submit`, `list`, `status`, `tail`, `fetch`, `cancel`, `retry-failed`: batch files through the queue.

Relies on `queue_road` for the work and on `options` for what all commands about files share. stdout carries ids, counts or
JSON; what goes on is on stderr.
"""

import hashlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import redis

from worker.batch.ledger import Ledger, Record
from worker.batch.lines import Rules
from worker.batch.options import (
    FileOptions,
    input_option,
    line_options,
    open_output,
    open_plan,
    output_options,
    take_options,
    tell_end,
)
from worker.batch.plan import Plan
from worker.batch.queue_road import Batch, Collector, Fetcher, Numbers, Tally, cancel, retry_failed, submit
from worker.command import CANCELLED, FAILED, OK, Command, command_line, fail, note, option, plain, queue_options, say
from worker.connection import connect
from worker.errors import InvalidOption
from worker.job_commands import UNSERVED_S, why_nobody_takes
from worker.keys import LANES
from worker.progress import Progress

F = TypeVar("F", bound=Callable[..., Any])

LOOK_S = 1.0
TTL_S = click.IntRange(60, 30 * 86_400)
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,100}")


def _job_options(function: F) -> F:
    function = option("--result-ttl-s", type=TTL_S, default=7 * 86_400, help="Seconds that results stay on the server.")(
        function
    )
    return option("--priority", type=click.Choice(LANES), default="low", help="Lane of the queue.")(function)


@click.command(
    "submit",
    cls=Command,
    short_help="Run a file through the queue, or add it and leave.",
    examples=[
        "worker batch submit -i in.jsonl -o out.jsonl",
        "worker batch submit -i in.jsonl -o out.jsonl --resume",
        "worker batch submit -i prompts.csv --prompt-column question --queue nightly",
    ],
)
@input_option
@output_options(required=False)
@line_options
@queue_options
@_job_options
@option("--window", type=click.IntRange(1, 100_000), default=2_000, help="With -o: most lines on the server at a time.")
@click.option("--id", "name", help="Id of the batch. Default: made of the file and how it is read.")
@option("--json", "as_json", is_flag=True, help="Print JSON, as OpenAI's batch object.")
def submit_command(
    *,
    redis_url: str,
    queue: str,
    priority: str,
    result_ttl_s: int,
    window: int,
    name: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Run the lines of a file as jobs of a queue.

    Without -o they are added, and the id of the batch is printed. With -o answers are written as they come, until all lines are
    done. The same file again goes on with the same batch.
    """
    options = take_options(given)
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidOption(f"--id: {name[:64]!r}: 1 to 100 of letters, digits and . _ : -; choose another name")
    with open_plan(options) as plan, connect(redis_url, queue) as server:
        batch = _batch(plan, options, name, priority, result_ttl_s)
        ledger = Ledger(server, queue)
        known = ledger.get(batch.batch_id)
        _check_open(known, batch, may_be_cancelled=options.retry_failed)
        with _watch(server, ledger, "batch", plan.num_good) as watch:
            if known and options.retry_failed:
                retry_failed(ledger, batch, watch)
            code = _add(ledger, batch, watch, known) if options.output is None else _run(ledger, batch, options, watch, window)
        if as_json:
            _say_record(ledger.find(batch.batch_id))
        elif options.output is None:
            say(batch.batch_id)
    raise click.exceptions.Exit(code)


@click.command("list", cls=Command, examples=["worker batch list"])
@queue_options
@option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def list_command(*, redis_url: str, queue: str, as_json: bool) -> None:
    """List the batches of a queue, the newest first."""
    with connect(redis_url, queue) as server:
        for record in Ledger(server, queue).records():
            say(json.dumps(record.to_openai()) if as_json else _line(record))


@click.command("status", cls=Command, examples=["worker batch status nightly --json"])
@click.argument("batch_id", metavar="ID")
@queue_options
@option("--json", "as_json", is_flag=True, help="Print JSON, as OpenAI's batch object.")
def status_command(batch_id: str, *, redis_url: str, queue: str, as_json: bool) -> None:
    """Print how far a batch is."""
    with connect(redis_url, queue) as server:
        record = Ledger(server, queue).find(batch_id)
    _say_record(record) if as_json else say(_line(record))


@click.command("tail", cls=Command, short_help="Follow a batch until it has ended.", examples=["worker batch tail nightly"])
@click.argument("batch_id", metavar="ID")
@queue_options
@option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def tail_command(batch_id: str, *, redis_url: str, queue: str, as_json: bool) -> None:
    """Follow a batch until it has ended: a bar on a terminal, and a line for each change of its counts, once a second."""
    with connect(redis_url, queue) as server:
        ledger = Ledger(server, queue)
        record = ledger.find(batch_id)
        with _goes_on(batch_id), _watch(server, ledger, "batch", record.num_good) as watch:
            shown = None
            while True:
                line = json.dumps(record.to_openai()) if as_json else _line(record)
                if line != shown:
                    say(shown := line)
                    watch.progress(record.num_ended)
                else:
                    watch.silence()
                if record.has_ended:
                    break
                time.sleep(LOOK_S)
                record = ledger.find(batch_id)
    if record.num_ended > record["succeeded"] or record["bad"]:
        raise click.exceptions.Exit(FAILED)


@click.command(
    "fetch",
    cls=Command,
    short_help="Write what has ended of a batch.",
    examples=["worker batch fetch nightly -o out.jsonl --wait", "worker batch fetch nightly -o out.jsonl --resume"],
)
@click.argument("batch_id", metavar="ID")
@output_options(required=True)
@queue_options
@option("--wait", is_flag=True, help="Go on until the batch has ended.")
@option("--json", "as_json", is_flag=True, help="Print JSON, as OpenAI's batch object.")
def fetch_command(batch_id: str, *, redis_url: str, queue: str, wait: bool, as_json: bool, **given: Any) -> None:
    """Write the answers that a batch has so far, or with --wait all; they stay on the server for their time.

    With --order input it is waited for the end first.
    """
    with connect(redis_url, queue) as server:
        ledger = Ledger(server, queue)
        record = ledger.find(batch_id)
        parameters = json.loads(record.fields["parameters"])
        given["input_path"] = Path(record.fields["input"])
        options = replace(take_options(given), rules=Rules(**parameters["rules"]))
        if options.resume and record.was_retried:  # errors that were fetched are old ones
            options = replace(options, retry_failed=True)
        is_late = options.order == "input"  # then a walk over the lines has their order
        with (
            _plan_of(record, options) as plan,
            open_output(plan, replace(options, order="done"), {}) as output,
            _watch(server, ledger, "fetching", plan.num_good) as watch,
        ):
            fetcher = Fetcher(ledger, batch_id, plan, output, watch)
            if is_late:
                _await_end(ledger, batch_id, watch)
            fetcher.follow() if wait and not is_late else fetcher.fetch()
            output.sync()
            record = ledger.find(batch_id)
            code = _tell_fetched(record, fetcher.tally, tell_end(output, options), output.num_answers)
        if as_json:
            _say_record(record)
    raise click.exceptions.Exit(code)


@click.command("cancel", cls=Command, short_help="End a batch.", examples=["worker batch cancel nightly"])
@click.argument("batch_id", metavar="ID")
@queue_options
@option("--json", "as_json", is_flag=True, help="Print JSON, as OpenAI's batch object.")
def cancel_command(batch_id: str, *, redis_url: str, queue: str, as_json: bool) -> None:
    """End a batch: no more of it is taken, and what has not ended does soon, with what it has."""
    with connect(redis_url, queue) as server:
        ledger = Ledger(server, queue)
        record = ledger.find(batch_id)
        with _watch(server, ledger, "cancelling", record["last"]) as watch:
            num_asked = cancel(ledger, record, watch)
        _say_record(ledger.find(batch_id)) if as_json else say(f"{batch_id}: {num_asked} jobs asked to end")


@click.command(
    "retry-failed",
    cls=Command,
    short_help="Run what did not succeed again.",
    examples=["worker batch retry-failed nightly", "worker batch retry-failed nightly -i moved/in.jsonl"],
)
@click.argument("batch_id", metavar="ID")
@click.option("-i", "--input", "input_path", type=click.Path(path_type=Path), help="Its file, where that has moved.")
@queue_options
@_job_options
@option("--json", "as_json", is_flag=True, help="Print JSON, as OpenAI's batch object.")
def retry_failed_command(
    batch_id: str, *, input_path: Path | None, redis_url: str, queue: str, priority: str, result_ttl_s: int, as_json: bool
) -> None:
    """Run the lines of a batch again that have ended and did not succeed, cancelled ones included."""
    with connect(redis_url, queue) as server:
        ledger = Ledger(server, queue)
        record = ledger.find(batch_id)
        given = {"input_path": input_path or Path(record.fields["input"])}
        options = replace(take_options(given), rules=Rules(**json.loads(record.fields["parameters"])["rules"]))
        with open_plan(options) as plan, _watch(server, ledger, "batch", plan.num_good) as watch:
            if plan.fingerprint != record.fields["fingerprint"]:
                raise InvalidOption(f"--input: {options.input}: is not the file of batch {batch_id}; give that one")
            batch = _batch(plan, options, batch_id, priority, result_ttl_s)
            num_added = retry_failed(ledger, batch, watch)
        _say_record(ledger.find(batch_id)) if as_json else say(f"{batch_id}: {num_added} jobs run again")


COMMANDS = (
    submit_command,
    list_command,
    status_command,
    tail_command,
    fetch_command,
    cancel_command,
    retry_failed_command,
)


class _Watch:
    """Says on stderr how it goes, and once each what is in its way."""

    def __init__(self, server: redis.Redis, ledger: Ledger, bar: Progress, total: int) -> None:
        self._server, self._ledger, self._bar, self._total = server, ledger, bar, total
        self._was_told_full = self._was_told_unserved = False
        self._moved = time.monotonic()

    def progress(self, num_done: int) -> None:
        self._moved = time.monotonic()
        self._bar.update(num_done, self._total)

    def full(self) -> None:
        if not self._was_told_full:
            self._was_told_full = True
            what = "the server's memory" if self._ledger.lacks_memory else f"queue {self._ledger.keys.queue}"
            note(f"{what} is full; waiting for room")

    def silence(self) -> None:
        if self._was_told_unserved or time.monotonic() - self._moved < UNSERVED_S:
            return
        try:
            why = why_nobody_takes(self._server, self._ledger.keys.queue)
        except redis.RedisError:  # it is asked again
            return
        if why:
            self._was_told_unserved = True
            note(why)


@contextmanager
def _watch(server: redis.Redis, ledger: Ledger, what: str, total: int) -> Iterator[_Watch]:
    with Progress(what, "lines") as bar:
        yield _Watch(server, ledger, bar, total)


def _batch(plan: Plan, options: FileOptions, name: str | None, priority: str, result_ttl_s: int) -> Batch:
    parameters = json.dumps({"rules": asdict(options.rules)}, sort_keys=True)
    drawn = hashlib.sha256(f"{plan.fingerprint} {parameters}".encode()).hexdigest()[:24]
    first = next(plan.todo(), None)
    facts: dict[str, object] = {
        "name": options.input.name,
        "input": options.input.resolve(),
        "fingerprint": plan.fingerprint,
        "parameters": parameters,
        "total": plan.num_lines,
        "bad": plan.num_lines - plan.num_good,
        "last": plan.last,
        "endpoint": first.endpoint if first else "",
    }
    return Batch(name or f"batch_{drawn}", plan, facts, priority, result_ttl_s)


def _check_open(record: Record | None, batch: Batch, *, may_be_cancelled: bool) -> None:
    """A batch holds one file, read in one way, and takes no more of it once it was cancelled."""
    if record is None:
        return
    if record.is_cancelled and not may_be_cancelled:
        fail(_was_cancelled(batch), CANCELLED)
    for fact in ("fingerprint", "parameters"):
        if record.fields[fact] != batch.facts[fact]:
            raise InvalidOption(f"--id: {batch.batch_id}: is a batch of another {fact}; choose another name")


def _add(ledger: Ledger, batch: Batch, watch: _Watch, known: Record | None) -> int:
    """`submit` without an output."""
    if known is not None and known.has_ended:
        again = command_line("worker", "batch", "fetch", batch.batch_id)
        note(f"batch {batch.batch_id} has ended already; {again} with -o writes it, another --id runs the file anew")
        return OK
    with _goes_on(batch.batch_id, "; the same command adds what is missing"):
        tally = submit(ledger, batch, watch)
    if tally.is_cancelled:
        fail(_was_cancelled(batch), CANCELLED)
    if tally.known:
        note(f"batch {batch.batch_id}: {tally.known} of its lines were on the queue already; {tally.added} were added")
    return FAILED if batch.facts["bad"] else OK


def _run(ledger: Ledger, batch: Batch, options: FileOptions, watch: _Watch, window: int) -> int:
    """`submit` with an output."""
    with open_output(batch.plan, options, {}) as output:
        output.remember(batch_id=batch.batch_id)
        collector = Collector(ledger, batch, output, watch, window, is_ordered=options.order == "input")
        tally = collector.run()
        code = tell_end(output, options)
    if tally.lost:
        note(f"batch {batch.batch_id}: the results of {tally.lost} lines are gone; --resume runs them again")
    if tally.is_cancelled:
        fail(_was_cancelled(batch), CANCELLED)
    return FAILED if tally.lost else code


def _was_cancelled(batch: Batch) -> str:
    again = command_line("worker", "batch", "retry-failed", batch.batch_id)
    return f"batch {batch.batch_id}: was cancelled; {again} opens it again, another --id runs the file anew"


@contextmanager
def _goes_on(batch_id: str, more: str = "") -> Iterator[None]:
    """Whoever leaves leaves the batch running."""
    try:
        yield
    except KeyboardInterrupt:
        end = command_line("worker", "batch", "cancel", batch_id)
        fail(f"left; batch {batch_id} goes on: end it with {end}{more}", CANCELLED)


@contextmanager
def _plan_of(record: Record, options: FileOptions) -> Iterator[Plan]:
    """The input where it is as it was, or else what the server knows of its lines."""
    if _fingerprint(options.input) == record.fields["fingerprint"]:
        with open_plan(options) as plan:
            yield plan
        return
    if record["bad"]:
        note(f"{options.input}: not there, or another by now: its {record['bad']} bad lines are not written")
    assert options.output is not None
    written = {path for path in (options.output, options.errors_path) if options.resume and path.is_file()}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield Numbers(record["last"], record.fields["fingerprint"], record.batch_id, sorted(written))
    finally:
        signal.signal(signal.SIGTERM, before)


def _fingerprint(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _await_end(ledger: Ledger, batch_id: str, watch: _Watch) -> None:
    while not (record := ledger.find(batch_id)).has_ended:
        watch.progress(record.num_ended)
        time.sleep(LOOK_S)


def _tell_fetched(record: Record, tally: Tally, code: int, num_answers: int) -> int:
    """What the files lack; the exit code."""
    open_jobs = max(0, record["added"] - record.num_ended)
    if open_jobs or not record.has_ended:
        num_open = max(open_jobs, record.num_good - record.num_ended)
        note(f"batch {record.batch_id}: {num_open} lines have not ended; --wait waits for them")
    if (gone := record.num_succeeded - num_answers) > 0:
        note(f"batch {record.batch_id}: the answers of {gone} lines are not on the server any more")
        return FAILED
    return FAILED if tally.lost else code


def _say_record(record: Record) -> None:
    say(json.dumps(record.to_openai()))


def _line(record: Record) -> str:
    made = datetime.fromtimestamp(record["created_ms"] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    counts = f"{record.num_succeeded} of {record['total']} succeeded, {record.num_failed} failed, {record['bad']} bad"
    running = f", {open_jobs} on the queue" if (open_jobs := record["added"] - record.num_ended) else ""
    return f"{record.batch_id}  {record.status}  {counts}{running}  {made}  {plain(record.fields.get('name', ''))}"
