"""Commands around single jobs: `worker enqueue` and `worker job show/tail/cancel/result`.

Relies on the client library for everything that is said to the server. stdout carries ids, text or JSON and nothing else, so
that it can be piped; what went wrong is on stderr.
"""

import json
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import IO, Any, cast

import click
import redis

from worker.broker import Broker
from worker.client import Client, refuse_unwritable
from worker.command import (
    BAD_INPUT,
    CANCELLED,
    FAILED,
    NOBODY_READS,
    SECONDS,
    Command,
    Group,
    command_line,
    fail,
    note,
    option,
    partition_options,
    say,
)
from worker.connection import connect
from worker.errors import InvalidOption, QueueClosed, QueueFull, UnknownJob, WaitTimeout
from worker.frames import FINAL_STATES, Result
from worker.job_view import job_data, job_text
from worker.keys import LANES, partition_of
from worker.partitions import PartitionedClient
from worker.queues import served_elsewhere
from worker.traceparent import well_formed
from worker.wire import encode_body, parse_body

SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "n", "ignore_eos", "include_stop", "model")
"""Options that are fields of the job body under the same name."""
UNSERVED_S = 3.0
"""How long a job may stay queued before it is asked whether anybody serves the queue."""
SHOWN_IDS = 3
"""Ids in a hint; the others are counted."""


@click.command(
    cls=Command,
    examples=[
        "worker enqueue --follow --chat 'Why is the sky blue?'",
        "worker enqueue -f prompts.txt --max-tokens 200 --priority low",
        "worker enqueue --wait --json --temperature 0 'Count to five.'",
    ],
)
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@partition_options
@click.option("-f", "--file", type=click.File("rb"), help="One prompt on each line; - is standard input.")
@option("--follow", is_flag=True, help="Stream each answer, in order.")
@option("--wait", is_flag=True, help="Print each answer when it is complete, in order.")
@option("--json", "as_json", is_flag=True, help="Print JSON lines: ids, or deltas and results.")
@option("--timeout-s", type=SECONDS, default=None, help="Seconds to wait for an answer. Default: no limit.")
@option("--chat", is_flag=True, help="Send each prompt as a user's message, through the model's chat template.")
@option("--system", default=None, help="System message; implies --chat.")
@click.option("--model", default=None, help="Name of the model that must answer.")
@option("--priority", type=click.Choice(LANES), default="normal", help="Lane of the queue.")
@option("--max-tokens", type=int, default=256, help="Most tokens of an answer.")
@option("--min-tokens", type=int, default=0, help="Tokens before an answer may end by itself.")
@option("--temperature", type=float, default=1.0, help="0 takes the likeliest token.")
@option("--top-k", type=int, default=0, help="Draw from the k likeliest tokens; 0 from all.")
@option("--top-p", type=float, default=1.0, help="Draw from the likeliest tokens that make up this probability.")
@option("--seed", type=int, default=None, help="The same seed draws the same answer. Default: a new one for each job.")
@option("--n", type=int, default=1, help="Answers to each prompt.")
@click.option("--stop", multiple=True, help="Text that ends an answer; may be given several times.")
@option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-text token.")
@option("--include-stop", is_flag=True, help="Keep the stop text in the answer.")
@option("--deadline-s", type=SECONDS, default=None, help="Seconds from now after which a job expires.")
@option("--delay-s", type=SECONDS, default=0.0, help="Seconds from now before which a job does not start.")
@option("--max-queued", type=click.IntRange(0, 2**53), default=None, help="Add nothing while so many jobs have not ended.")
@option("--wait-for-room", is_flag=True, help="Wait while the queue is full.")
@click.option("--id", "job_id", default=None, help="Id of the job, for one prompt; the same id again adds nothing.")
@click.option(
    "--traceparent", envvar="TRACEPARENT", show_envvar=True, default=None, help="Trace that the job belongs to (W3C)."
)
@click.option("--idempotency-key", default=None, help="For one prompt; the same key again within a day adds nothing.")
def enqueue(prompts: tuple[str, ...], *, redis_url: str, queue: str, partitions: int, **options: Any) -> None:
    """Add one job for each PROMPT and print its id, or its answer."""
    texts = [*prompts, *_lines(options["file"])]
    if not texts:
        raise InvalidOption("no prompt; give one as an argument, or a file with -f, or standard input with -f -")
    if options["job_id"] and len(texts) > 1:
        raise InvalidOption(f"--id: {options['job_id']}: {len(texts)} prompts; an id is for one")
    if options["idempotency_key"] and len(texts) > 1:
        raise InvalidOption(f"--idempotency-key: {len(texts)} prompts; a key is for one")
    bodies = [_body(text, options) for text in texts]
    for body in bodies:  # all before the first is added
        parse_body(body)
        encode_body(body)
    how = {"follow": options["follow"], "as_json": options["as_json"]}
    with _Answers(redis_url, queue, partitions, options["timeout_s"], **how) as answers:
        _add(answers, bodies, options)
        if options["follow"] or options["wait"]:
            answers.show()


def _add(answers: "_Answers", bodies: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Add the jobs. Each id is told at once, as what follows may fail: on stderr when the answers go to stdout.

    All are added whether or not somebody reads their ids to the end.
    """
    unread: click.exceptions.Exit | None = None
    for body in bodies:
        job_id = _put(answers, body, options)
        answers.job_ids.append(job_id)
        if not options["follow"] and not options["wait"]:
            try:
                say(json.dumps({"id": job_id}) if options["as_json"] else job_id)
            except click.exceptions.Exit as left:
                if left.exit_code != NOBODY_READS:
                    raise
                unread = left
        elif len(bodies) > 1 or sys.stderr.isatty():
            note(f"job {job_id}")
    if unread is not None:
        raise unread


def _put(answers: "_Answers", body: dict[str, Any], options: dict[str, Any]) -> str:
    """Add one job, where told to as soon as there is room; its id. A closed queue is not waited for: nobody knows how long."""
    how = {name: options[name] for name in ("delay_s", "max_queued", "idempotency_key")}
    until = math.inf if options["timeout_s"] is None else time.monotonic() + options["timeout_s"]
    while True:
        try:
            return answers.client.enqueue(**body, **how)
        except QueueClosed:
            raise
        except QueueFull as full:
            if not options["wait_for_room"]:
                raise
            answers.tell_full()
            pause_s = full.retry_after_s * random.uniform(1.0, 1.5)  # so that producers do not come back at once
            if time.monotonic() + pause_s > until:
                raise WaitTimeout(f"{full}; --timeout-s is over") from None
            time.sleep(pause_s)


@click.group(cls=Group)
def job() -> None:
    """Look at one job, follow it, end it."""


@job.command(examples=["worker job show 01JD3Z --json"])
@click.argument("job_id", metavar="ID")
@partition_options
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(job_id: str, *, redis_url: str, queue: str, partitions: int, as_json: bool) -> None:
    """Print what the server knows of a job."""
    queue = _partition_of(queue, job_id, partitions)
    with connect(redis_url, queue) as server, Client(server, queue) as client:
        state = client.state(job_id)
        known = Broker(server, queue, "client").job(job_id)
        ended = _result_of(client, job_id) if state in FINAL_STATES else None
        now_s, _ = cast("tuple[int, int]", server.time())  # its clock wrote the times
    data = job_data(job_id, state, known, ended)
    say(json.dumps(data) if as_json else job_text(data, ended, now_s * 1000))


def _result_of(client: Client, job_id: str) -> Result | None:
    """What an ended job has left, if it is still there."""
    with suppress(UnknownJob):
        return client.result(job_id)
    return None


@job.command(examples=["worker job tail 01JD3Z"])
@click.argument("job_id", metavar="ID")
@partition_options
@option("--json", "as_json", is_flag=True, help="Print JSON lines.")
@option("--timeout-s", type=SECONDS, default=None, help="Seconds to wait for the end. Default: no limit.")
def tail(job_id: str, *, redis_url: str, queue: str, partitions: int, as_json: bool, timeout_s: float | None) -> None:
    """Stream a job's answer from its first token to its end."""
    with _Answers(redis_url, queue, partitions, timeout_s, job_id, follow=True, as_json=as_json) as answers:
        answers.show()


@job.command(examples=["worker job cancel 01JD3Z 01JD40"])
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@partition_options
@option("--json", "as_json", is_flag=True, help="Print JSON, a line for each job.")
def cancel(job_ids: tuple[str, ...], *, redis_url: str, queue: str, partitions: int, as_json: bool) -> None:
    """Ask for the end of one or more jobs, and print the state that each was in."""
    with _client(redis_url, queue, partitions) as client:
        unknown = [job_id for job_id in job_ids if not _cancel(client, job_id, as_json=as_json)]
    if unknown:
        raise click.exceptions.Exit(BAD_INPUT)


def _cancel(client: Client | PartitionedClient, job_id: str, *, as_json: bool) -> bool:
    """Ask for one end; whether the queue knows the job. One that it does not know keeps none of the others."""
    try:
        state = client.cancel(job_id)
    except UnknownJob as unknown:
        note(str(unknown))
        return False
    say(json.dumps({"id": job_id, "state": state}) if as_json else state)
    return True


@job.command(examples=["worker job result 01JD3Z --timeout-s 60"])
@click.argument("job_id", metavar="ID")
@partition_options
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@option("--timeout-s", type=SECONDS, default=None, help="Seconds to wait for the end. Default: no limit.")
def result(job_id: str, *, redis_url: str, queue: str, partitions: int, as_json: bool, timeout_s: float | None) -> None:
    """Wait for a job's end and print its answer."""
    with _Answers(redis_url, queue, partitions, timeout_s, job_id, follow=False, as_json=as_json) as answers:
        answers.show()


def _lines(file: IO[bytes] | None) -> Iterator[str]:
    """The lines of a file that hold something; a byte-order mark is not text."""
    for number, line in enumerate(file or (), 1):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise InvalidOption(f"--file: {getattr(file, 'name', '-')}, line {number}: not UTF-8; convert the file") from None
        if prompt := text.lstrip("\ufeff").rstrip("\r\n"):
            yield prompt


def _body(text: str, options: dict[str, Any]) -> dict[str, Any]:
    """The client's arguments for one prompt."""
    body = {name: options[name] for name in SAMPLING if options[name] is not None}
    body |= {"stop": list(options["stop"]), "priority": options["priority"], "id": options["job_id"]}
    if traceparent := well_formed(options["traceparent"]):
        body["traceparent"] = traceparent
    if options["deadline_s"] is not None:
        body["deadline_ms"] = int((time.time() + options["deadline_s"]) * 1000)
    if not options["chat"] and not options["system"]:
        return body | {"prompt": text}
    system = [{"role": "system", "content": options["system"]}] if options["system"] else []
    return body | {"messages": [*system, {"role": "user", "content": text}]}


class _Answers:
    """Prints the answers of jobs in order, and tells on stderr what is in their way.

    Leaves with 1 when a job did not succeed, and inside `with` with 3 at Ctrl-C; the jobs themselves go on.
    """

    def __init__(
        self, url: str, queue: str, partitions: int, timeout_s: float | None, *job_ids: str, follow: bool, as_json: bool
    ) -> None:
        self.client = _client(url, queue, partitions)
        self.job_ids = list(job_ids)
        self._url, self._queue, self._partitions = url, queue, partitions
        self._servers: dict[str, redis.Redis] = {}
        self._opened = ExitStack()
        self._timeout_s = timeout_s
        self._show_one = self._follow if follow else self._wait
        self._as_json = as_json
        self._num_shown = 0
        self._is_inside_line = False
        self._started = time.monotonic()
        self._was_told_unserved = False
        self._was_told_full = False

    def __enter__(self) -> "_Answers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self.client, self._opened:
            if isinstance(error, KeyboardInterrupt):
                self._end_line()
                fail(self._what_goes_on(), CANCELLED)

    def tell_full(self) -> None:
        """Tell once that the queue is full."""
        if not self._was_told_full:
            self._was_told_full = True
            note(f"queue {self._queue} is full; waiting for room")

    def show(self) -> None:
        num_failed = 0
        for job_id in self.job_ids:
            ended = self._show_one(job_id)
            num_failed += ended.state != "succeeded"
            self._num_shown += 1
        if num_failed:
            raise click.exceptions.Exit(FAILED)

    def _follow(self, job_id: str) -> Result:
        stream = self.client.stream(job_id, self._timeout_s, on_silence=partial(self._on_silence, job_id))
        for delta in stream:
            if self._as_json:
                say(json.dumps({"id": job_id} | asdict(delta)))
            elif delta.choice:  # one is printed as it comes, the others when all have ended
                continue
            elif delta.is_restart:
                self._end_line()
                note(f"job {job_id}: starts again at character {delta.offset}")
            elif delta.text:
                self._is_inside_line = True
                say(delta.text, nl=False)
        assert stream.result is not None
        if self._as_json:
            say(json.dumps(stream.result.to_dict()))
        else:
            self._is_inside_line |= stream.result.state == "succeeded"  # an empty answer is a line too
            self._end_line()
            _say_choices(stream.result, first=1)
            _explain(stream.result)
        return stream.result

    def _wait(self, job_id: str) -> Result:
        ended = self.client.result(job_id, self._timeout_s, on_silence=partial(self._on_silence, job_id))
        if self._as_json:
            say(json.dumps(ended.to_dict()))
        else:
            if ended.state == "succeeded" or any(choice.text for choice in ended.choices):
                _say_choices(ended)
            _explain(ended)
        return ended

    def _end_line(self) -> None:
        if self._is_inside_line:
            self._is_inside_line = False
            say()

    def _on_silence(self, job_id: str, state: str | None) -> None:
        """Tell once why nobody takes the job: a misspelt queue, or a paused one, looks like a slow one."""
        if self._was_told_unserved or state not in (None, "queued", "delayed") or time.monotonic() - self._started < UNSERVED_S:
            return
        queue = partition_of(self._queue, job_id, self._partitions)
        if why := why_nobody_takes(self._server(queue), queue):
            self._was_told_unserved = True
            note(why)

    def _server(self, queue: str) -> redis.Redis:
        """A connection beside the client's own, to the node of this partition."""
        if queue not in self._servers:
            self._servers[queue] = self._opened.enter_context(connect(self._url, queue))
        return self._servers[queue]

    def _what_goes_on(self) -> str:
        """The jobs that were not shown and have not ended, and what ends them."""
        if not self.job_ids:
            return "cancelled; no job was added"
        jobs = self.job_ids[self._num_shown :]
        with suppress(redis.RedisError):  # asked once: to wait for a server would keep the one who wants to leave
            jobs = self._still_open(jobs)
        if not jobs:
            return "left; all jobs have ended"
        shown, more = jobs[:SHOWN_IDS], len(jobs) - SHOWN_IDS
        rest = f", and {more} more like it" if more > 0 else ""
        goes_on = "the job goes on: end it" if len(jobs) == 1 else f"{len(jobs)} jobs go on: end them"
        return f"left; {goes_on} with {command_line('worker', 'job', 'cancel', *shown)}{rest}"

    def _still_open(self, job_ids: list[str]) -> list[str]:
        """Those that have not ended, in their order."""
        parted: dict[str, list[str]] = {}
        for job_id in job_ids:
            parted.setdefault(partition_of(self._queue, job_id, self._partitions), []).append(job_id)
        still_open: set[str] = set()
        for queue, part in parted.items():
            still_open.update(Broker(self._server(queue), queue, "client").still_open(part))
        return [job_id for job_id in job_ids if job_id in still_open]


def _client(url: str, queue: str, partitions: int) -> Client | PartitionedClient:
    return Client(url, queue) if partitions == 1 else PartitionedClient(url, queue, partitions)


def _partition_of(queue: str, job_id: str, partitions: int) -> str:
    """The queue in which a job with this id is to be looked for."""
    refuse_unwritable(job_id)
    return partition_of(queue, job_id, partitions)


def _say_choices(ended: Result, first: int = 0) -> None:
    """The choices, one after the other. Of several the numbers are on stderr, so that stdout holds answers alone."""
    for number, choice in enumerate(ended.choices[first:], first + 1):
        if len(ended.choices) > 1:
            note(f"job {ended.id}: choice {number} of {len(ended.choices)}: {choice.finish_reason or 'not ended'}")
        say(choice.text)


def _explain(ended: Result) -> None:
    """Why a job did not succeed, and in which trace to look, on stderr."""
    if ended.state != "succeeded":
        why = ": ".join(filter(None, (ended.state, ended.code if ended.code != ended.state else None, ended.error)))
        note(f"job {ended.id}: {why}{f'; traceparent {ended.traceparent}' if ended.traceparent else ''}")


def why_nobody_takes(server: redis.Redis, queue: str) -> str | None:
    """What keeps the jobs of a queue, or partition, waiting, other than jobs; None where nothing does."""
    broker = Broker(server, queue, "client")
    if not broker.has_worker():
        start = f"start one with {command_line('worker', 'start')}"
        elsewhere = served_elsewhere(server, queue)
        return "; ".join(filter(None, (f"no worker serves queue {queue} yet", "waiting", start, elsewhere)))
    if broker.paused_and_dead()[0]:
        resume = command_line("worker", "queue", "resume", partition=queue)
        return f"queue {queue} is paused; waiting; {resume} ends that"
    return None
