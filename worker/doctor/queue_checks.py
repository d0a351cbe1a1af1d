"""What state one queue is in, as checks of `worker doctor`. Nothing is written, and no body is read.

Relies on the names of worker/keys.py. Times are the server's, so that a clock that is wrong here changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
from redis.exceptions import ResponseError

from worker.broker import Broker, LaneCounts
from worker.doctor.findings import Finding, ok, warn
from worker.doctor.server_facts import settled, told
from worker.keys import GROUP, PSEUDO_CONSUMERS, WORKER_TTL_S, Keys
from worker.queue_admin import heard_of

OLD_S: Final = 3600.0
"""A job that nobody takes for so long is worth a look."""
OVERDUE_S: Final = 60.0
"""Fetching makes due jobs claimable, every second or so."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A worker as a lane's group knows it."""

    name: str
    num_pending: int


@dataclass(frozen=True, kw_only=True)
class QueueFacts:
    """What a server answered about a queue; where it refused, the error that it refused with."""

    queue: str
    has_groups: Sequence[bool] | ResponseError
    """For each lane."""
    live: Mapping[str, float] | ResponseError
    """Worker -> seconds since its last heartbeat, of those heard of within three."""
    config: Mapping[str, str] | ResponseError
    counts: Mapping[str, LaneCounts] | ResponseError
    num_dead: int | ResponseError
    num_overdue: int | ResponseError
    consumers: Sequence[Consumer] | ResponseError


def gather(client: redis.Redis, queue: str) -> QueueFacts:
    """Ask a server what the checks want to know. Raises redis' errors of connections."""
    server: Any = client  # redis-py's types cannot tell its sync replies from awaitables
    keys = Keys(queue)
    return QueueFacts(
        queue=queue,
        has_groups=told(lambda: [_has_group(server, lane) for lane in keys.lanes]),
        live=told(lambda: heard_of(server.zrange(keys.workers, 0, -1, withscores=True), _now_ms(server))),
        config=told(lambda: {name.decode(): value.decode() for name, value in server.hgetall(keys.config).items()}),
        counts=told(Broker(client, queue, "doctor").queue_counts),
        num_dead=told(lambda: int(server.xlen(keys.dead))),
        num_overdue=told(lambda: sum(_num_overdue(server, delayed) for delayed in keys.delayed_lanes)),
        consumers=told(lambda: [consumer for lane in keys.lanes for consumer in _consumers(server, lane)]),
    )


def _now_ms(server: Any) -> float:
    seconds, micros = server.time()
    return float(seconds) * 1000 + float(micros) / 1000


def _num_overdue(server: Any, delayed: str) -> int:
    return int(server.zcount(delayed, "-inf", _now_ms(server) - OVERDUE_S * 1000))


def _has_group(server: Any, lane: str) -> bool:
    return bool(server.exists(lane)) and any(group["name"] == GROUP.encode() for group in server.xinfo_groups(lane))


def _consumers(server: Any, lane: str) -> list[Consumer]:
    rows = server.xinfo_consumers(lane, GROUP) if _has_group(server, lane) else []
    return [Consumer(row["name"].decode(), row["pending"]) for row in rows]


def group(facts: QueueFacts) -> Finding:
    if all(settled(facts.has_groups, "XINFO GROUPS")):
        return ok(f"{GROUP} on every lane")
    return warn("not on every lane: no worker has served this queue yet", _start(facts))


def workers(facts: QueueFacts) -> Finding:
    live = settled(facts.live, "heartbeats")
    if not live:
        return warn(f"none was heard of for {WORKER_TTL_S} s", _start(facts))
    return ok(f"{len(live)} alive, the last heard of {min(live.values()):.1f} s ago")


def paused(facts: QueueFacts) -> Finding:
    config = settled(facts.config, "HGETALL cfg")
    states = [name for name in ("paused", "closed") if config.get(name) == "1"]
    if not states:
        return ok("neither paused nor closed")
    return warn(" and ".join(states), f"worker queue resume --queue {facts.queue}")


def oldest(facts: QueueFacts) -> Finding:
    ages_s = {lane: count.oldest_age_s for lane, count in settled(facts.counts, "counts.lua").items()}
    lane = max(ages_s, key=lambda name: ages_s[name])
    found = f"the oldest waiting job waits for {ages_s[lane]:.0f} s in lane {lane}" if ages_s[lane] else "no job waits"
    return warn(found, f"more workers, or {_start(facts)}") if ages_s[lane] > OLD_S else ok(found)


def abandoned(facts: QueueFacts) -> Finding:
    live = settled(facts.live, "heartbeats")
    held = [
        consumer
        for consumer in settled(facts.consumers, "XINFO CONSUMERS")
        if consumer.num_pending and consumer.name not in live and consumer.name not in PSEUDO_CONSUMERS
    ]
    if not held:
        return ok("every job taken is in the hands of a living worker")
    found = f"{sum(consumer.num_pending for consumer in held)} jobs held by {', '.join(sorted({c.name for c in held})[:3])}"
    remedy = f"{_start(facts)}; it takes them over once their lease has run out"
    return warn(f"{found}, which sent no heartbeat for {WORKER_TTL_S} s", remedy)


def overdue(facts: QueueFacts) -> Finding:
    count = settled(facts.num_overdue, "ZCOUNT delayed")
    if not count:
        return ok("no delayed job is overdue")
    return warn(f"{count} delayed jobs are due since {OVERDUE_S:.0f} s and more", _start(facts))


def dead(facts: QueueFacts) -> Finding:
    count = settled(facts.num_dead, "XLEN dead")
    return (
        warn(f"{count} jobs were set aside", f"worker dead list --queue {facts.queue}") if count else ok("no job was set aside")
    )


CHECKS: Final = (group, workers, paused, oldest, abandoned, overdue, dead)
"""In the order of the table in docs/operations.md, which says what each of them wants."""


def _start(facts: QueueFacts) -> str:
    return f"worker start --queue {facts.queue}"
