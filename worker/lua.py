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

Call = tuple[Sequence[str], Sequence[Any]]
"""Keys and arguments of one run; the first key is the job's where order matters."""


@cache
def _script(name: str) -> tuple[str, str]:
    """The text of a script with what it shares in front, and its SHA-1, by which the server knows it."""
    shared = ["_common", "_take"] if name in ("fetch", "reclaim") else ["_common"]
    folder = resources.files("worker.scripts")
    text = "\n".join(folder.joinpath(f"{part}.lua").read_text("utf-8") for part in (*shared, name))
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Scripts:
    """Runs scripts by hash; a server that forgot them (SCRIPT FLUSH, restart, failover) is told them again."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client

    def run(self, name: str, keys: Sequence[str], *args: Any) -> Any:
        """The reply of one script."""
        text, sha = _script(name)
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
            self._client.script_load(_script(name)[0])
            for i, reply in zip(again, self._pipeline(name, [calls[i] for i in again]), strict=True):
                replies[i] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _pipeline(self, name: str, calls: Sequence[Call]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            for keys, args in calls:
                pipe.evalsha(_script(name)[1], len(keys), *keys, *args)
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
