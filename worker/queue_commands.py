"""Commands around a whole queue and what it has set aside: `worker queue ...` and `worker dead ...`.

Relies on `QueueAdmin` for everything that is said to the server, and on `queue_view` for how it looks. Repeating any of them
does no harm. What would end or forget jobs asks first, and demands --yes where nobody can be asked. A prompt is shown by
`worker dead show --body` alone.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import click
import redis

from worker.codec import MalformedError, parse_json, unpack
from worker.command import CANCELLED, FAILED, SECONDS, Group, command_line, fail, note, option, plain, queue_options, say
from worker.connection import connect, is_cluster, unavailable
from worker.errors import InvalidOption, ProtocolError, UnknownJob, WaitTimeout
from worker.keys import LANES
from worker.queue_admin import DeadRow, QueueAdmin, QueueStats
from worker.queue_view import dead_data, dead_text, jobs_text, queue_data, queues_text, stats_data, stats_text
from worker.queues import LOOK_S, find_queues

WATCH_S = 1.0
DRAIN_POLL_S = 0.5
MAX_LIMIT = 2**53
MAX_LISTED = 500
"""Queues that are asked for what they hold, three round trips each."""
SHOWN_IDS = 3
"""Ids in an error; the others are counted."""

_as_json = option("--json", "as_json", is_flag=True, help="Print JSON.")
_as_json_lines = option("--json", "as_json", is_flag=True, help="Print JSON lines.")


@contextmanager
def _opened(redis_url: str, queue: str) -> Iterator[QueueAdmin]:
    """The queue, on a connection whose errors tell host and remedy."""
    with connect(redis_url, queue) as server:
        try:
            yield QueueAdmin(server, queue)
        except redis.RedisError as error:
            raise unavailable(server, error) from error


@click.group("queue", cls=Group)
def queue_group() -> None:
    """Look at a queue, hold it, empty it, bound it."""


@queue_group.command("list", examples=["worker queue list", "worker queue list --json"])
@queue_options
@_as_json_lines
def list_queues(*, redis_url: str, queue: str, as_json: bool) -> None:
    """Print the queues that a server holds: what waits, runs and is dead in each, and how many workers serve it.

    Of a cluster it asks the node that owns --queue. The server's keys are looked through for 5 seconds at most.
    """
    with connect(redis_url, queue) as server:
        try:
            found = find_queues(server)
            listed = [QueueAdmin(server, name).stats() for name in found.queues[:MAX_LISTED]]
        except redis.RedisError as error:
            raise unavailable(server, error) from error
        if is_cluster(server):
            note(f"only queues on the node of queue {queue}; --queue with the name of another asks its node")
    if as_json:
        for stats in listed:
            say(json.dumps(queue_data(stats)))
    elif listed:
        say(queues_text(listed))
    else:
        note("no queue on this server yet")
    if not found.is_whole:
        note(f"there may be more: the server has too many keys to look through in {LOOK_S:g} s")
    elif len(found.queues) > MAX_LISTED:
        note(f"the first {MAX_LISTED} of {len(found.queues)}")


@queue_group.command(examples=["worker queue stats --queue nightly", "worker queue stats --watch"])
@queue_options
@_as_json
@option("--watch", is_flag=True, help="Print anew each second until Ctrl-C.")
def stats(*, redis_url: str, queue: str, as_json: bool, watch: bool) -> None:
    """Print what waits, runs and has ended, the queue's settings, and who serves it."""

    def shown(found: QueueStats) -> str:
        return json.dumps(stats_data(found)) if as_json else stats_text(found)

    with _opened(redis_url, queue) as admin:
        if not watch:
            found = admin.stats()
            say(shown(found))
            if not found.workers and not as_json and (elsewhere := admin.served_elsewhere()):
                note(elsewhere)
        elif sys.stdout.isatty() and not as_json:
            _watch_live(lambda: shown(admin.stats()))
        else:
            _watch(lambda: shown(admin.stats()))


@queue_group.command(examples=["worker queue pause --queue nightly"])
@queue_options
@_as_json
def pause(*, redis_url: str, queue: str, as_json: bool) -> None:
    """Let no worker take a job; those that run go on, and producers may add more."""
    with _opened(redis_url, queue) as admin:
        admin.pause()
        _tell(admin, f"paused; {command_line('worker', 'queue', 'resume')} ends that", as_json=as_json)


@queue_group.command(examples=["worker queue resume --queue nightly"])
@queue_options
@_as_json
def resume(*, redis_url: str, queue: str, as_json: bool) -> None:
    """Let workers take jobs again, and producers add them: ends both a pause and a drain."""
    with _opened(redis_url, queue) as admin:
        admin.resume()
        _tell(admin, "open", as_json=as_json)


@queue_group.command(examples=["worker queue drain --timeout-s 600", "worker queue drain --no-wait"])
@queue_options
@option("--timeout-s", type=SECONDS, default=None, help="Seconds to wait for the last job. Default: no limit.")
@option("--no-wait", is_flag=True, help="Close the queue and leave.")
@_as_json
def drain(*, redis_url: str, queue: str, timeout_s: float | None, no_wait: bool, as_json: bool) -> None:
    """Take no jobs from producers any more, and wait until all that there are have ended.

    A bare XADD is not a producer that can be refused. The queue stays closed: worker queue resume reopens it.
    """
    with _opened(redis_url, queue) as admin:
        admin.close()
        reopens = f"{command_line('worker', 'queue', 'resume')} reopens it"
        if no_wait:
            _tell(admin, f"closed; {reopens}", as_json=as_json)
            return
        try:
            _wait_until_empty(admin, timeout_s, reopens)
        except KeyboardInterrupt:
            fail(f"left; queue {queue} stays closed; {reopens}", CANCELLED)
        _tell(admin, f"empty and closed; {reopens}", as_json=as_json)


@queue_group.command(examples=["worker queue purge --lane low", "worker queue purge --queue nightly --yes"])
@queue_options
@option("--lane", type=click.Choice(LANES), default=None, help="Only this lane. Default: all of them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
def purge(*, redis_url: str, queue: str, lane: str | None, yes: bool, as_json: bool) -> None:
    """End every job that waits now, delayed ones too, as cancelled; jobs that run go on."""
    with _opened(redis_url, queue) as admin:
        where = f"queue {queue}, lane {lane}" if lane else f"queue {queue}"
        if not yes:
            waiting = admin.stats().lanes[lane].waiting if lane else admin.stats().num_waiting
            _confirm(f"{where}: end {jobs_text(waiting, 'waiting ')}?")
        lanes = [lane] if lane else list(LANES)
        number = admin.purge(lanes)
        data = {"queue": queue, "lanes": lanes, "jobs": number}
        say(json.dumps(data) if as_json else f"{where}: {jobs_text(number)} to end as cancelled")
        if number:
            _tell_what_holds(admin.stats())


@queue_group.command(examples=["worker queue limit 10000", "worker queue limit none"])
@click.argument("bound", metavar="N|none")
@queue_options
@_as_json
def limit(bound: str, *, redis_url: str, queue: str, as_json: bool) -> None:
    """Bound the jobs that have not ended, whoever adds them; none takes the bound away."""
    max_queued = _max_queued(bound)
    with _opened(redis_url, queue) as admin:
        admin.set_limit(max_queued)
        _tell(admin, "no limit" if max_queued is None else f"limit {max_queued}", as_json=as_json)


@click.group("dead", cls=Group)
def dead_group() -> None:
    """Jobs that were set aside for people: they killed what ran them, or no worker speaks their version."""


@dead_group.command("list", examples=["worker dead list --limit 10"])
@queue_options
@option("--limit", "max_rows", type=click.IntRange(1), default=50, help="Jobs shown, the newest first.")
@_as_json_lines
def list_dead(*, redis_url: str, queue: str, max_rows: int, as_json: bool) -> None:
    """Print when, why and where jobs died, without what was asked."""
    with _opened(redis_url, queue) as admin:
        rows = list(islice(_newest(admin), max_rows))
        num_rows = admin.stats().dead
    if as_json:
        for row in rows:
            say(json.dumps(dead_data(row)))
    elif rows:
        say(dead_text(rows))
    elif sys.stderr.isatty():
        note(f"no dead job on queue {queue}")
    if len(rows) == max_rows and num_rows > max_rows:
        note(f"the newest {max_rows} of {num_rows}; --limit shows more")


@dead_group.command("show", examples=["worker dead show 01JD3Z --body"])
@click.argument("job_id", metavar="ID")
@queue_options
@_as_json
@click.option("--body", "with_body", is_flag=True, help="Add the job's body, which holds the prompt.")
def show_dead(job_id: str, *, redis_url: str, queue: str, as_json: bool, with_body: bool) -> None:
    """Print what is known of a dead job."""
    with _opened(redis_url, queue) as admin:
        row = next((row for row in admin.dead_rows() if row.job_id == job_id), None)
        if row is None:
            raise _not_dead([job_id], queue)
        known = dead_data(row) | ({"body": _body(admin, row)} if with_body else {})
    if as_json:
        say(json.dumps(known))
        return
    width = max(map(len, known))
    for name, value in known.items():
        text = json.dumps(value, ensure_ascii=False) if name == "body" else str(value)
        say(f"{name:{width}}  {plain(text)}")


@dead_group.command(examples=["worker dead replay 01JD3Z", "worker dead replay --all --json"])
@click.argument("job_ids", metavar="[ID]...", nargs=-1)
@queue_options
@click.option("--all", "is_all", is_flag=True, help="All that are dead now.")
@_as_json_lines
def replay(job_ids: tuple[str, ...], *, redis_url: str, queue: str, is_all: bool, as_json: bool) -> None:
    """Give dead jobs a new life under their ids, as if they had never run, and print what became of each.

    queued: it waits in its lane. exists: another job has that id by now. gone: somebody else was faster. bodiless: nothing was
    kept that could run. All but those queued stay as they are.
    """
    with _opened(redis_url, queue) as admin:
        jobs = _chosen(admin, job_ids, is_all=is_all)
        statuses = dict(zip(jobs, admin.replay(list(jobs.values())), strict=True))
        for job_id, status in statuses.items():
            say(json.dumps({"id": job_id, "status": status}) if as_json else f"{plain(job_id)}  {status}")
        if unknown := [job_id for job_id in job_ids if job_id not in jobs]:
            raise _not_dead(unknown, queue)
    if not set(statuses.values()) <= {"queued"}:
        raise click.exceptions.Exit(FAILED)


@dead_group.command(examples=["worker dead drop 01JD3Z", "worker dead drop --all --yes"])
@click.argument("job_ids", metavar="[ID]...", nargs=-1)
@queue_options
@click.option("--all", "is_all", is_flag=True, help="All that are dead now; asks first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json_lines
def drop(job_ids: tuple[str, ...], *, redis_url: str, queue: str, is_all: bool, yes: bool, as_json: bool) -> None:
    """Forget dead jobs: they can no longer be shown or replayed."""
    with _opened(redis_url, queue) as admin:
        jobs = _chosen(admin, job_ids, is_all=is_all)
        if is_all and jobs and not yes:
            _confirm(f"queue {queue}: forget {jobs_text(len(jobs), 'dead ')}?")
        admin.drop([row for rows in jobs.values() for row in rows])
        if as_json:
            for job_id in jobs:
                say(json.dumps({"id": job_id, "status": "dropped"}))
        else:
            say(f"queue {queue}: {jobs_text(len(jobs), 'dead ')} dropped")
        if unknown := [job_id for job_id in job_ids if job_id not in jobs]:
            raise _not_dead(unknown, queue)


def _tell(admin: QueueAdmin, words: str, *, as_json: bool) -> None:
    """What a queue is now, in words or as `worker queue list` has it."""
    say(json.dumps(queue_data(admin.stats())) if as_json else f"queue {admin.keys.queue}: {words}")


def _watch(shown: Callable[[], str]) -> None:
    try:
        while True:
            say(shown())
            time.sleep(WATCH_S)
    except KeyboardInterrupt:  # the way out
        return


def _watch_live(shown: Callable[[], str]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    try:
        with Live(Text(shown()), console=Console(), auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_S)
                live.update(Text(shown()), refresh=True)
    except KeyboardInterrupt:  # the way out
        return


def _wait_until_empty(admin: QueueAdmin, timeout_s: float | None, reopens: str) -> None:
    """Poll until no job is left; `WaitTimeout` after `timeout_s`. A line on a terminal says how many there are."""
    from rich.console import Console

    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    line = Console(stderr=True).status("") if sys.stderr.isatty() else nullcontext()
    if any(admin.num_open()):
        _tell_what_holds(admin.stats())
    with line as status:
        while any(counts := admin.num_open()):
            left = f"{jobs_text(sum(counts))} left" + (f", {counts[1]} of them delayed" if counts[1] else "")
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"queue {admin.keys.queue}: {left} after {timeout_s:g} s; it stays closed; {reopens}")
            if status is not None:
                status.update(left)
            time.sleep(DRAIN_POLL_S)


def _tell_what_holds(stats: QueueStats) -> None:
    """Why what waits will not end by itself."""
    if stats.is_paused:
        note(f"queue {stats.queue} is paused: nothing that waits ends before it is resumed")
    elif not stats.workers:
        note(f"no worker serves queue {stats.queue}: nothing that waits ends before one does")


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidOption("nobody can be asked here; give --yes")
    if not click.confirm(question, err=True):
        raise click.Abort


def _max_queued(bound: str) -> int | None:
    if bound == "none":
        return None
    if not bound.isascii() or not bound.isdigit() or len(bound) > 16 or int(bound) > MAX_LIMIT:
        raise InvalidOption(f"{bound[:64]!r}: a number of jobs from 0 to {MAX_LIMIT}, or none")
    return int(bound)


def _newest(admin: QueueAdmin) -> Iterator[DeadRow]:
    """The row that counts of each dead job."""
    seen: set[str] = set()
    for row in admin.dead_rows():
        if row.job_id not in seen:
            seen.add(row.job_id)
            yield row


def _chosen(admin: QueueAdmin, job_ids: Sequence[str], *, is_all: bool) -> dict[str, list[DeadRow]]:
    """The rows of these dead jobs, or of all, those first that died first."""
    if is_all == bool(job_ids):
        raise InvalidOption("give ids, or --all for all of them")
    found = admin.dead_jobs(None if is_all else job_ids)
    return dict(reversed(found.items()))


def _not_dead(job_ids: Sequence[str], queue: str) -> UnknownJob:
    shown, more = ", ".join(map(plain, job_ids[:SHOWN_IDS])), len(job_ids) - SHOWN_IDS
    rest = f" and {more} more" if more > 0 else ""
    listed = command_line("worker", "dead", "list")
    return UnknownJob(f"job {shown}{rest}: not among the dead of queue {queue}; {listed} shows them")


def _body(admin: QueueAdmin, row: DeadRow) -> Any:
    """The body as plain data; `ProtocolError` when none was kept, or it cannot be read."""
    kept = admin.dead_body(row)
    if kept is None:
        raise ProtocolError(f"job {plain(row.job_id)}: no body was kept; leave out --body")
    try:
        body = unpack(kept[1]) if kept[0] == "m" else parse_json(kept[1])
        json.dumps(body, allow_nan=False)
    except (MalformedError, TypeError, ValueError) as error:
        raise ProtocolError(f"job {plain(row.job_id)}: body: {error}; leave out --body") from None
    return body
