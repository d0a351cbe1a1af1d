"""`worker top`: a live view of one queue, its workers, their slots and what is in them.

Relies on `watch` for looks, on `view` for how they are shown and on `screen` for the live screen, imported when the command
runs.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import redis

from worker.command import Command, command_line, note, option, queue_options, say
from worker.connection import connect, unavailable
from worker.keys import names_of
from worker.queue_view import stats_data

if TYPE_CHECKING:
    from worker.top.watch import Look, Watch, WorkerLook


@click.command(
    cls=Command,
    short_help="Watch a queue and its workers, live.",
    examples=["worker top --queue nightly", "worker top --once --json"],
)
@queue_options
@option("--partitions", type=int, default=1, help="Queues that the queue is split into.")
@option("--once/--live", default=None, help="Print one look and leave. Default: where the output is no terminal.")
@option("--json", "as_json", is_flag=True, help="Print JSON, a line for each look.")
@option("--interval-s", type=click.FloatRange(0.1, 3600), default=1.0, help="Seconds between two looks.")
@option("--worker", "worker_id", default="", help="Worker shown in detail. Default: the first.")
def top(
    *, redis_url: str, queue: str, partitions: int, once: bool | None, as_json: bool, interval_s: float, worker_id: str
) -> None:
    """Watch a queue and its workers: slots and who is in them, KV cache, lanes, rates and latencies.

    Workers are asked while one looks and say nothing otherwise. Rates and quantiles are of the last 10 seconds, those of a
    first look since the workers' start. q or Ctrl-C leaves.
    """
    is_terminal = bool(sys.stdout and sys.stdout.isatty())  # there is none at all where it was closed
    is_live = is_terminal if once is None else not once
    with _watching(redis_url, queue, partitions) as watch:
        if as_json:
            _print_all(watch, interval_s, is_live=is_live)
        elif is_live and is_terminal:
            from worker.top.screen import show

            show(watch, interval_s, worker_id, "; ".join(filter(None, (_start_words(), watch.served_elsewhere()))))
        else:
            _print_text(watch, interval_s, worker_id, is_live=is_live)


@contextmanager
def _watching(redis_url: str, queue: str, partitions: int) -> Iterator["Watch"]:
    """Errors of the server tell host and remedy."""
    from worker.top.watch import Watch

    names = names_of(queue, partitions)
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(redis_url, name)) for name in names]
        watch = Watch(clients, queue, names)
        stack.callback(watch.close)
        try:
            yield watch
        except redis.RedisError as error:
            raise unavailable(clients[0], error) from error


def _print_all(watch: "Watch", interval_s: float, *, is_live: bool) -> None:
    for look in _looks(watch, interval_s, is_live=is_live):
        say(json.dumps(look_data(look)))


def _print_text(watch: "Watch", interval_s: float, worker_id: str, *, is_live: bool) -> None:
    from rich.console import Console

    from worker.top.view import ViewState, render

    console, state = Console(highlight=False), ViewState(chosen=worker_id)
    for look in _looks(watch, interval_s, is_live=is_live):
        for line in render(look, state, console.width, start=_start_words()):
            with console.capture() as shown:
                console.print(line, no_wrap=True, crop=False, soft_wrap=True)
            say(shown.get(), nl=False)
        if not is_live and not look.workers and (elsewhere := watch.served_elsewhere()):
            note(elsewhere)


def _looks(watch: "Watch", interval_s: float, *, is_live: bool) -> Iterator["Look"]:
    """One look, or looks until Ctrl-C."""
    try:
        while True:
            began = time.monotonic()
            yield watch.look()
            if not is_live:
                return
            time.sleep(max(0.0, began + interval_s - time.monotonic()))
    except KeyboardInterrupt:
        if not is_live:
            raise


def _start_words() -> str:
    return command_line("worker", "start")


def look_data(look: "Look") -> dict[str, Any]:
    """A look as plain data: the queue as `worker queue stats --json` has it, figures, and each worker with its snapshot."""
    return {
        "at": look.at,
        "queue": stats_data(look.queue),
        "figures": look.figures.data(),
        "workers": [_worker_data(worker) for worker in look.workers],
        "unreadable": look.unreadable,
    }


def _worker_data(worker: "WorkerLook") -> dict[str, Any]:
    return {
        "id": worker.id,
        "is_silent": worker.now is None,
        "heartbeat": dict(worker.beat),
        "snapshot": None if worker.now is None else asdict(worker.now),
        "figures": None if worker.now is None else worker.figures.data(),
    }
