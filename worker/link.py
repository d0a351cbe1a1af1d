"""Calls to the server from one thread: timed, counted, retried by whoever called, never hot.

Relies on redis-py without its own retries. A blind retry doubles writes, so a failed call is only repeated by a caller that
knows the script is safe to run twice. Leaves what to do meanwhile to the caller; every failure comes out as `LinkDownError`.
"""

import random
import time
from collections.abc import Callable
from typing import TypeVar

import redis

from worker import log
from worker.metrics import SCRIPTS, Metrics

MAX_BACKOFF_S = 2.0
NO_SERVER = "mend --redis-url, or start a server with `worker redis`; the worker goes on when one serves it"
MEMORY_S = 10.0

T = TypeVar("T")

_log = log.get("link")
_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (redis.AuthenticationError, "auth"),
    (redis.TimeoutError, "timeout"),
    (redis.BusyLoadingError, "loading"),
    (redis.ConnectionError, "connection"),
    (redis.ReadOnlyError, "readonly"),
    (redis.OutOfMemoryError, "out_of_memory"),
)


class LinkDownError(Exception):
    """The server did not answer, or refused; nothing was acknowledged and nothing may be taken as done."""


class Link:
    """One thread's road to the server. Owned by that thread; others only read its state."""

    def __init__(self, name: str, metrics: Metrics, throttle: log.Throttle) -> None:
        """`throttle` is shared by all links of the process."""
        self.name = name
        self._metrics = metrics
        self._throttle = throttle
        self._failures = 0
        self._failed_at = 0.0
        self.last_ok = 0.0
        """`time.monotonic` of the last call that was answered, 0 before any."""

    @property
    def is_failing(self) -> bool:
        """Whether calls fail now; a thread that has stopped calling since its last failure knows nothing."""
        return self._failures > 0 and time.monotonic() - self._failed_at < MEMORY_S

    def call(self, script: str, function: Callable[[], T]) -> T:
        """Run one call to the server; `LinkDownError` when it was refused or not answered."""
        started = time.monotonic()
        try:
            result = function()
        except redis.RedisError as error:
            self._note(script, error)
            raise LinkDownError(script) from error
        self.last_ok = time.monotonic()
        if script in SCRIPTS:  # a wait is no measure of the server
            self._metrics.redis_script_duration_seconds.labels(script).observe(self.last_ok - started)
        if self._failures:
            self._failures = 0
            _log.info("server_back", link=self.name)
        return result

    def pause(self) -> None:
        """Wait after a failure: 50 ms, doubling to 2 s, with jitter so that a fleet does not come back at once."""
        backoff_s = min(MAX_BACKOFF_S, 0.05 * 2 ** min(self._failures, 6))
        time.sleep(backoff_s * random.uniform(0.5, 1.0))

    def _note(self, script: str, error: redis.RedisError) -> None:
        self._failures += 1
        self._failed_at = time.monotonic()
        kind = next((kind for known, kind in _KINDS if isinstance(error, known)), "response")
        self._metrics.redis_errors.labels(kind).inc()
        about = {} if self.last_ok else {"remedy": NO_SERVER}
        self._throttle.write(
            _log.warning, "server_unusable", link=self.name, call=script, kind=kind, error=str(error)[:200], **about
        )
