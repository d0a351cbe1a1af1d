"""Runs the scripts of worker/scripts on a server by their hash, and tells it the text when it does not know it.

Every script is safe to run twice, which is what makes sending again right. What the scripts do is theirs and
worker/broker.py's business.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError

from worker.connection import is_cluster
from worker.frames import FINAL_STATES
from worker.keys import GROUP, JOB_TTL_S, LANES, PSEUDO_CONSUMERS, RELEASED, SUSPECTS

Call = tuple[Sequence[str], Sequence[Any]]
"""Keys and arguments of one run; the first key is the job's where order matters."""


@cache
def script(name: str, publish: str = "PUBLISH") -> tuple[str, str]:
    """The text of a script with what it shares in front, and its SHA-1, by which the server knows it."""
    shared = ["_common", "_give_back"] if name in ("fetch", "release", "reclaim") else ["_common"]
    folder = resources.files("worker.scripts")
    text = "\n".join([*_constants(publish), *(folder.joinpath(f"{part}.lua").read_text("utf-8") for part in (*shared, name))])
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _constants(publish: str) -> list[str]:
    """What the scripts take from Python, where it is decided."""
    words = {"PUBLISH": publish, "GROUP": GROUP, "RELEASED": RELEASED, "SUSPECTS": SUSPECTS}
    sets = {"ENDED": FINAL_STATES, "LANES": LANES, "PSEUDO": PSEUDO_CONSUMERS}
    return [
        *(f"local {name} = '{word}'" for name, word in words.items()),
        *(f"local {name} = {{ {', '.join(f'{word} = true' for word in members)} }}" for name, members in sets.items()),
        f"local JOB_TTL_S = {JOB_TTL_S}",
    ]


class Scripts:
    """Runs scripts by hash; a server that forgot them (SCRIPT FLUSH, restart, failover) is told them again."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client
        self._publish = "SPUBLISH" if is_cluster(client) else "PUBLISH"

    def run(self, name: str, keys: Sequence[str], *args: Any) -> Any:
        """The reply of one script."""
        text, sha = script(name, self._publish)
        try:
            return self._client.evalsha(sha, len(keys), *keys, *args)
        except NoScriptError:
            self._client.script_load(text)
            return self._client.evalsha(sha, len(keys), *keys, *args)

    def run_many(self, name: str, calls: Sequence[Call]) -> list[Any]:
        """All calls in one pipeline, their replies in order. Raises the first error once every call was answered."""
        replies = self._pipeline(name, calls)
        again = _unanswered(replies, [keys[0] for keys, _ in calls])
        if again:
            self._client.script_load(script(name, self._publish)[0])
            for i, reply in zip(again, self._pipeline(name, [calls[i] for i in again]), strict=True):
                replies[i] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _pipeline(self, name: str, calls: Sequence[Call]) -> list[Any]:
        _, sha = script(name, self._publish)
        with self._client.pipeline(transaction=False) as pipe:
            for keys, args in calls:
                pipe.evalsha(sha, len(keys), *keys, *args)
            replies: list[Any] = pipe.execute(raise_on_error=False)
            return replies


def _unanswered(replies: Sequence[Any], jobs: Sequence[str]) -> list[int]:
    """Calls that met no script, and later ones of the same job: those ran before their turn."""
    again: list[int] = []
    held: set[str] = set()
    for i, (reply, job) in enumerate(zip(replies, jobs, strict=True)):
        if isinstance(reply, NoScriptError) or job in held:
            held.add(job)
            again.append(i)
    return again
