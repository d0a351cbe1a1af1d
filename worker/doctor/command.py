"""`worker doctor`: what a server, a queue and a machine lack, one line for each check, and below it how to mend that.

Gathers facts, judges them and prints; the checks are in `server_checks`, `queue_checks` and `machine_checks`, imported when the
command runs. Nothing is changed but for keys of its own that are deleted at once.
"""

import contextlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

import click
import redis

from worker.command import FAILED, Command, note, option, queue_options, say, server_words
from worker.connection import connect, unavailable
from worker.doctor.findings import Row, run_checks
from worker.errors import InvalidOption
from worker.settings import DEFAULT_METRICS_PORT, DEFAULT_MODEL

if TYPE_CHECKING:
    from worker.doctor.machine_checks import Selfcheck

SECTIONS: Final = ("server", "queue", "machine")
_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red", "unknown": "cyan"}


@click.command(
    cls=Command,
    short_help="Check server, queue and machine, and say how to mend them.",
    examples=["worker doctor", "worker doctor --only server,queue --strict"],
)
@queue_options
@option("--model", default=DEFAULT_MODEL, help="The model that is to be served; looked for, not fetched.")
@option("--metrics-port", type=click.IntRange(0, 65535), default=DEFAULT_METRICS_PORT, help="Port of the worker's probes.")
@option("--only", default=",".join(SECTIONS), metavar="PART[,PART...]", help="What to check: server, queue, machine.")
@option("--engine/--no-engine", default=True, help="Check torch, GPU and kernels, which takes seconds.")
@option("--strict", is_flag=True, help="Warnings are failures too.")
@option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def doctor(
    *, redis_url: str, queue: str, model: str, metrics_port: int, only: str, engine: bool, strict: bool, as_json: bool
) -> None:
    """Check what a worker needs of its server, its queue and this machine, and say how to mend what is amiss.

    Leaves with 1 when a check failed, with 5 when no server answers.
    """
    sections = _sections(only)
    rows: list[Row] = []
    with _selfcheck(wanted=engine and "machine" in sections) as selfcheck:
        if "server" in sections or "queue" in sections:
            rows += _ask_server(redis_url, queue, sections)
        if "machine" in sections:
            rows += _look_around(model, metrics_port, selfcheck)
    for line in _json_lines(rows) if as_json else _lines(rows):
        say(line)
    bad = [row.check for row in rows if row.verdict == "fail" or (strict and row.verdict == "warn")]
    if bad:
        note(f"{len(bad)} of {len(rows)} checks failed: {', '.join(bad)}")
        raise click.exceptions.Exit(FAILED)


def _sections(only: str) -> list[str]:
    given = [name.strip() for name in only.split(",")]
    if unknown := [name for name in given if name not in SECTIONS]:
        raise InvalidOption(f"--only: {unknown[0][:64]!r} is none of {', '.join(SECTIONS)}; write --only server,queue")
    return given


@contextlib.contextmanager
def _selfcheck(*, wanted: bool) -> Iterator["Selfcheck | None"]:
    if not wanted:
        yield None
        return
    from worker.doctor.machine_checks import Selfcheck

    with contextlib.closing(Selfcheck()) as selfcheck:
        yield selfcheck


def _ask_server(url: str, queue: str, sections: list[str]) -> list[Row]:
    """Rows of the server and its queue. Raises ServerUnavailable when it does not answer."""
    from worker.doctor import queue_checks, server_checks, server_facts

    rows: list[Row] = []
    with connect(url, queue) as client:
        try:
            if "server" in sections:
                rows += run_checks("server", server_checks.CHECKS, server_facts.gather(client, url, queue))
            if "queue" in sections:
                found = run_checks("queue", queue_checks.CHECKS, queue_checks.gather(client, queue))
                rows += map(_with_server, found)
        except redis.RedisError as error:
            raise unavailable(client, error) from error
    return rows


def _with_server(row: Row) -> Row:
    """A remedy that is a command works as it stands: it names the server that was asked. Words may follow a `;`."""
    if not row.remedy.startswith("worker "):
        return row
    option, where = server_words()
    line, *more = row.remedy.partition(";")
    return replace(row, remedy="".join([" ".join([line, *map(shlex.quote, option)]), where, *more]))


def _look_around(model: str, port: int, selfcheck: "Selfcheck | None") -> list[Row]:
    """Rows of this machine, without those that need torch when there is no `selfcheck`."""
    from worker.doctor import machine_checks

    facts = machine_checks.gather(model, port, selfcheck.report() if selfcheck else None)
    checks = [check for check in machine_checks.CHECKS if selfcheck or check not in machine_checks.NEED_TORCH]
    return run_checks("machine", checks, facts)


def _json_lines(rows: list[Row]) -> Iterator[str]:
    return (json.dumps(asdict(row)) for row in rows)


def _lines(rows: list[Row]) -> Iterator[str]:
    """As text. What mends several stands below the first of them."""
    width = max(len(row.check) for row in rows)
    told = {""}
    for row in rows:
        verdict = click.style(f"{row.verdict:7}", fg=_COLOURS[row.verdict])
        yield f"{row.section:7}  {row.check:{width}}  {verdict}  {row.found}"
        if row.remedy not in told:
            told.add(row.remedy)
            yield f"{'':{width + 11}}mend: {row.remedy}"
