"""What `worker queue stats`, `worker queue list` and `worker dead list` show, as text and as plain data for JSON.

Relies on nothing but the records that it is given. Text that others wrote cannot steer a terminal: `command.plain`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from worker.broker import LaneCounts
from worker.command import plain
from worker.queue_admin import DeadRow, QueueStats

MAX_WORKERS = 20
"""Workers that fit on a screen with the rest; the others are counted."""
_NUMBERS = ("pid", "slots", "active")


def jobs_text(number: int, kind: str = "") -> str:
    """So many jobs, in words."""
    return f"{number} {kind}job{'s' * (number != 1)}"


def span(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = int(seconds)
    for size, unit, smaller in ((86_400, "d", (3600, "h")), (3600, "h", (60, "m")), (60, "m", (1, "s"))):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller[0]} {smaller[1]}"
    return f"{whole} s"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, but for the last one, whose text may be long."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def stats_text(stats: QueueStats) -> str:
    """A screen of what a queue holds, and who serves it."""
    due = "" if stats.due_in_s is None else f" (next due in {span(stats.due_in_s)})"
    parts = [
        f"queue {stats.queue}: {condition(stats)}",
        _lanes(stats),
        f"delayed {stats.delayed}{due}, dead {stats.dead}, done {stats.done}",
    ]
    if stats.purging:
        parts.append(f"purged: {', '.join(stats.purging)}: what waited then ends as cancelled when a worker comes to it")
    return "\n\n".join([*parts, _workers(stats)])


def stats_data(stats: QueueStats) -> dict[str, Any]:
    """The same as plain data. Times in seconds."""
    lanes = {
        name: {
            "entries": lane.entries,
            "waiting": lane.waiting,
            "held": lane.pending,
            "released": lane.released,
            "suspects": lane.suspects,
            "delayed": lane.delayed,
            "oldest_age_s": lane.oldest_age_s,
        }
        for name, lane in stats.lanes.items()
    }
    workers = [
        worker | {name: _count(worker[name]) for name in _NUMBERS if name in worker} | {"seen_s": float(worker["seen_s"])}
        for worker in stats.workers
    ]
    return asdict(stats) | {"lanes": lanes, "workers": workers}


def queues_text(queues: Sequence[QueueStats]) -> str:
    """A line for each queue."""
    head = ("queue", "waiting", "running", "dead", "workers", "state")
    rows = [
        (stats.queue, *map(str, (stats.num_waiting, stats.num_running, stats.dead, len(stats.workers))), condition(stats))
        for stats in queues
    ]
    return table([head, *[tuple(map(plain, row)) for row in rows]])


def queue_data(stats: QueueStats) -> dict[str, Any]:
    """What such a line holds, as plain data."""
    return {
        "queue": stats.queue,
        "waiting": stats.num_waiting,
        "running": stats.num_running,
        "dead": stats.dead,
        "workers": len(stats.workers),
        "is_paused": stats.is_paused,
        "is_closed": stats.is_closed,
        "max_queued": stats.max_queued,
    }


def dead_text(rows: Sequence[DeadRow]) -> str:
    """A line for each dead job."""
    head = ("when", "why", "attempts", "owner", "id", "error")
    lines = [(_when(row), row.why, str(row.attempts), row.owner, row.job_id, row.error) for row in rows]
    return table([head, *[tuple(map(plain, line)) for line in lines]])


def dead_data(row: DeadRow) -> dict[str, Any]:
    """A dead job as plain data, without its body."""
    return {
        "id": row.job_id,
        "dead_ms": row.dead_ms,
        "why": row.why,
        "attempts": row.attempts,
        "owner": row.owner,
        "lane": row.lane,
        "body_bytes": row.body_bytes,
        "error": row.error,
    }


def _when(row: DeadRow) -> str:
    return f"{datetime.fromtimestamp(row.dead_ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"


def condition(stats: QueueStats) -> str:
    """Whether it is open, paused or closed, and its limit, in words."""
    words = [word for word, holds in (("paused", stats.is_paused), ("closed", stats.is_closed)) if holds] or ["open"]
    return ", ".join([*words, "no limit" if stats.max_queued is None else f"limit {stats.max_queued}"])


def _lanes(stats: QueueStats) -> str:
    head = ("lane", "entries", "waiting", "held", "released", "suspects", "delayed", "oldest")
    rows = [(name, *map(str, _numbers(lane)), _oldest(lane.oldest_age_s)) for name, lane in stats.lanes.items()]
    return table([head, *rows])


def _numbers(lane: LaneCounts) -> tuple[int, ...]:
    return lane.entries, lane.waiting, lane.pending, lane.released, lane.suspects, lane.delayed


def _oldest(age_s: float) -> str:
    return span(age_s) if age_s else "-"


def _count(text: str) -> int:
    """A number that a worker wrote, 0 for what is none."""
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _workers(stats: QueueStats) -> str:
    if not stats.workers:
        return "no worker serves this queue"
    head = ("worker", "model", "slots", "active", "state", "seen")
    rows = [
        (worker["id"], *(worker.get(name, "?") for name in ("model", "slots", "active", "state")), f"{worker['seen_s']} s ago")
        for worker in stats.workers[:MAX_WORKERS]
    ]
    shown = table([head, *[tuple(map(plain, row)) for row in rows]])
    more = len(stats.workers) - MAX_WORKERS
    return f"{shown}\nand {more} more" if more > 0 else shown
