"""Which queues a server holds, and which of them somebody serves, found by their keys.

A look goes through the names of all keys in pages and ends when its time is over, so that a server of millions costs no more.
Of a cluster it sees the one node that the client is connected to. Needs the right to SCAN, which workers and producers do not.
"""

import difflib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

LOOK_S: Final = 5.0
GLANCE_S: Final = 0.5
"""Of a look that nobody asked for."""
PAGE: Final = 1000
_PATTERN: Final = "slotmill:{*}:[jdw][oe][bnalr][sedak]*"
"""Lanes, done, dead, delayed, workers: what a queue has however many jobs it holds. A job's own keys do not match."""
_KEY: Final = re.compile(r"slotmill:\{([^\s{}\x00-\x1f\ud800-\udfff]{1,128})\}:(jobs:\w+|delayed:\w+|done|dead|workers)")
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Found:
    """Queues in the order of their names; `served` are those of which a worker was heard of."""

    queues: tuple[str, ...]
    served: tuple[str, ...]
    is_whole: bool
    """Whether all keys were looked at."""


def find_queues(client: redis.Redis, look_s: float = LOOK_S) -> Found:
    """Look at the names of the server's keys for so long at most. Errors are redis'."""
    server: Any = client  # redis-py's types cannot tell its sync replies from awaitables
    until = time.monotonic() + look_s
    kinds: dict[str, set[str]] = {}
    cursor = -1
    while cursor and (cursor < 0 or time.monotonic() < until):
        cursor, keys = server.scan(max(cursor, 0), match=_PATTERN, count=PAGE)
        for key in keys:
            if parts := _KEY.fullmatch(key.decode(errors="surrogateescape")):
                kinds.setdefault(parts[1], set()).add(parts[2])
    served = (name for name, of_queue in kinds.items() if "workers" in of_queue)
    return Found(tuple(sorted(kinds)), tuple(sorted(served)), is_whole=cursor == 0)


def served_elsewhere(client: redis.Redis, queue: str) -> str:
    """Other queues of the server that workers serve, those with a like name first, in words; none are no words.

    A hint: what the server does not tell is left out.
    """
    try:
        served = [name for name in find_queues(client, GLANCE_S).served if name != queue]
    except redis.RedisError:
        return ""
    return f"here workers serve {_some(_alike_first(served, queue))}" if served else ""


def _alike_first(names: Sequence[str], queue: str) -> list[str]:
    return sorted(names, key=lambda name: -difflib.SequenceMatcher(None, name, queue).ratio())


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
