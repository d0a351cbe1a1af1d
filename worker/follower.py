"""Following one job: what is to be asked and heard next, and what is new of it, whatever becomes of workers and connections.

A generator of steps that does no input or output of its own, so that a thread (`worker/client.py`) and an event loop
(`worker/async_client.py`) follow by the same rules (docs/protocol.md, "Client"). Relies on `worker/deltas.py` for what is new
in a frame; leaves subscribing, retries and pauses to who drives it.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from worker.broker import ENDED
from worker.deltas import Assembler, Delta
from worker.errors import WaitTimeout
from worker.frames import ControlFrame, Result, decode_frame, decode_result
from worker.keys import Keys

PAGE = 512
"""Frames of the log read at a time."""


@dataclass(frozen=True, slots=True)
class Hear:
    """Wanted: what the channel brings next, as `connection.hear` answers it; None after `wait_s`.

    Who drives keeps its subscription from the first of these steps to the end, or to a step with another channel.
    """

    channel: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class Silence:
    """Told: nothing was heard for a while, and this is the job's state."""

    state: str | None


Step = Delta | Hear | Silence | Callable[[], Any]
"""A callable waits for the server, for as long as a command takes; its answer is wanted."""
Steps = Generator[Step, Any, None]


class Follower:
    """Follows one job over one connection after another: subscribe, then replay the log, then live."""

    def __init__(
        self, redis: Any, keys: Keys, job_id: str, *, find: Callable[[str], str], deadline: float | None, check_s: float
    ) -> None:
        """`find`: the state of a job without a hash, or `UnknownJob`; `deadline` by `time.monotonic`; `check_s`: silence after
        which the server is asked whether the job has ended, or its log has more than was heard.
        """
        self.result: Result | None = None
        self.state: str | None = None
        """As far as seen and heard; None while no worker has seen the job."""
        self._redis = redis
        self._keys = keys
        self._job_id = job_id
        self._find = find
        self._deadline = deadline
        self._check_s = check_s
        self._assembler = Assembler()
        self._attempt = 0
        self._last_replayed: bytes | None = None

    def follow(self) -> Steps:
        """Deltas until the job has ended, and what is to be done for them. When a step fails, call it again."""
        yield from self._catch_up(self._is_unread)
        while self.result is None:
            heard = yield Hear(self._keys.channel(self._job_id), self._wait_s())
            if heard is None:
                yield from self._catch_up(self._is_ahead)
                if self.result is None:
                    yield Silence(self.state)
            elif heard[0] == "message":
                yield from self._take(heard[1])
            else:  # a confirmation: our first, or another after redis-py has reconnected by itself
                yield from self._catch_up(self._is_unread)

    def _wait_s(self) -> float:
        if self._deadline is None:
            return self._check_s
        left_s = self._deadline - time.monotonic()
        if not left_s > 0:  # NaN, too
            raise self._timeout()
        return min(self._check_s, left_s)

    def _timeout(self) -> WaitTimeout:
        state = self.state or "queued"
        left = "it goes on" if state == "running" else f"it is {state}, and `worker queue stats` tells who serves the queue"
        return WaitTimeout(f"job {self._job_id}: has not ended in the time given; {left}: wait longer, or cancel it", state)

    def _take(self, data: bytes) -> Steps:
        frame = decode_frame(data)
        self.state = "running"
        self._attempt = max(self._attempt, frame.attempt)
        deltas = self._assembler.add(frame)
        if deltas is None:
            yield from self._replay()
            deltas = self._assembler.add(frame)
        yield from deltas or ()
        if isinstance(frame, ControlFrame) and frame.event == "end":
            yield from self._end((yield partial(self._redis.get, self._keys.result(self._job_id))))

    def _catch_up(self, is_news: Callable[[bytes], bool]) -> Steps:
        """Look for what was not heard: an end, more in the log (`is_news` of its last entry), another id that the body named,
        FLUSHALL.
        """
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hmget(self._keys.job(self._job_id), "state", "alias")  # first: who has ended has a result
        pipeline.xrevrange(self._keys.log(self._job_id), count=1)
        pipeline.get(self._keys.result(self._job_id))
        (state, alias), last, stored = yield pipeline.execute
        self.state = None if state is None else state.decode()
        if last and is_news(last[0][0]):
            yield from self._replay()
        if stored is not None:
            yield from self._end(stored)
        elif alias is not None:
            self._job_id = alias.decode()
        elif state is None or state in ENDED:
            yield partial(self._find, self._job_id)

    def _is_unread(self, entry_id: bytes) -> bool:
        """Whether the log has changed since the last replay: what a new connection has to know."""
        return entry_id != self._last_replayed

    def _is_ahead(self, entry_id: bytes) -> bool:
        """Whether the log has tokens, or an attempt, that were not heard; its entries are named `<attempt>-<tokens logged>`.

        What a silent connection has to know, at less cost: a slow job is silent between any two tokens.
        """
        attempt, _, num_tokens = entry_id.partition(b"-")
        return (int(attempt), int(num_tokens)) > (self._attempt, self._assembler.num_tokens)

    def _replay(self) -> Steps:
        """All of the log from its start: after a failover it may be another than the one we knew."""
        start = b"-"
        while page := (yield partial(self._redis.xrange, self._keys.log(self._job_id), start, "+", count=PAGE)):
            for entry_id, fields in page:
                frame = decode_frame(fields[b"m"])
                self._attempt = max(self._attempt, frame.attempt)
                yield from self._assembler.add(frame) or ()
                self._last_replayed = entry_id
            start = b"(" + page[-1][0]

    def _end(self, stored: bytes | None) -> Steps:
        if stored is not None:
            result = decode_result(stored)
            yield from self._assembler.finish(result)
            self.result = result
