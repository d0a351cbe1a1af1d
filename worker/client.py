"""The client library: put jobs in, stream tokens, fetch results, cancel.

Relies on the broker for what changes a job, and on `worker/follower.py` for what a stream has to ask and hear. Imports no
torch. A lost connection is made anew, with growing and jittered pauses, as long as the caller's deadline and `patience_s`
allow; a server that was never reached is reported at once.

    with Client("redis://127.0.0.1:6379") as client:
        stream = client.stream(client.enqueue("Why is the sky blue?", max_tokens=64))
        for text in stream.text():
            print(text, end="")
        print(stream.result.usage)
"""

import os
import random
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from redis.client import PubSub
from redis.exceptions import AuthorizationError

from worker.broker import ENDED, Broker, EnqueueReply
from worker.codec import has_lone_surrogate
from worker.connection import DEFAULT_REDIS_URL, connect, hear, subscribe, unavailable
from worker.deltas import Delta, Shown
from worker.errors import InvalidJob, QueueClosed, QueueFull, UnknownJob
from worker.follower import Follower, Hear, Silence
from worker.frames import Result, decode_result
from worker.keys import DEFAULT_QUEUE, JOB_TTL_S
from worker.wire import encode_body, parse_body

if TYPE_CHECKING:
    from worker.async_client import AsyncClient, AsyncJobStream
else:

    def __getattr__(name: str) -> object:
        """The asynchronous half, imported by those who want it."""
        if name in ("AsyncClient", "AsyncJobStream"):
            from worker import async_client

            return getattr(async_client, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ("AsyncClient", "AsyncJobStream", "Client", "Delta", "JobStream")

CHECK_S = 1.0
"""Silence after which the server is asked whether the job has ended, or its log has more than was heard."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
MAX_DELAY_S = JOB_TTL_S
"""As long as the server remembers a job that nothing happens to."""
CLOSED = "client: it is closed; make another one"
CLOSED_S = 10.0
"""When to ask again whether a queue has been reopened."""

T = TypeVar("T")
OnSilence = Callable[[str | None], None]
"""Called about once a `CHECK_S` while nothing is heard of a job, with its state (None: no worker has seen it)."""
_PASSING = ("MISCONF", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN")


class Client:
    """One queue as producers and readers see it. Threads may share it."""

    def __init__(self, server: "str | redis.Redis", queue: str = DEFAULT_QUEUE, *, patience_s: float = 30.0) -> None:
        """`server` is a URL (see worker/connection.py), or a client with bytes replies that stays the caller's to close.

        `patience_s`: how long a server that has gone is waited for.
        """
        self._owns = isinstance(server, str)
        self._redis: Any = connect(server, queue) if isinstance(server, str) else server
        if self._redis.get_encoder().decode_responses:
            raise ValueError("client: decode_responses is True, which cannot carry msgpack; pass one with False")
        self._broker = Broker(self._redis, queue, worker_id="client")
        self._keys = self._broker.keys
        self._patience_s = patience_s if patience_s > 0 else 0.0  # NaN, too
        self._was_reached = False
        self._is_closed = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @classmethod
    def from_env(cls, *, patience_s: float = 30.0) -> "Client":
        """The server and queue that the commands would use: SLOTMILL_REDIS_URL and SLOTMILL_QUEUE, or their defaults."""
        return cls(*from_env(), patience_s=patience_s)

    def close(self) -> None:
        """Close what this client opened. Calls raise `RuntimeError` from then on."""
        self._is_closed = True
        self._broker.close()
        if self._owns:
            self._redis.close()

    def enqueue(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        id: str | None = None,  # noqa: A002  the name of the field
        priority: str = "normal",
        idempotency_key: str | None = None,
        max_queued: int | None = None,
        delay_s: float = 0.0,
        **fields: object,
    ) -> str:
        """Put a job in; its id. `fields` are those of a job body (docs/protocol.md), checked here as a worker would.

        With an `id` or `idempotency_key` that is known nothing is put in and the id that is there is answered, so a call that
        failed may be repeated. `max_queued` bounds the jobs that have not ended, beside what bound the queue itself has.
        The job waits for `delay_s` seconds, 30 days at most, before it may start. Raises `InvalidJob`, `QueueFull` (its kind
        `QueueClosed` while the queue is drained), `ServerUnavailable`.
        """
        given = {"prompt": prompt, "messages": _plain(messages)}
        body = {name: value for name, value in given.items() if value is not None} | fields
        job_id = uuid.uuid4().hex if id is None else id
        job = parse_body(body | {"id": job_id, "priority": priority})
        _check_bounds(idempotency_key, max_queued, delay_s)
        packed = encode_body(body)
        reply = self._call(  # safe to repeat: the server knows the id
            lambda: self._broker.enqueue(
                job_id,
                priority,
                packed,
                idempotency_key=idempotency_key,
                max_queued=max_queued,
                deadline_ms=job.deadline_ms,
                tenant=job.tenant,
                batch_id=job.batch_id,
                delay_s=delay_s,
            )
        )
        self._refuse_unless_taken(reply, max_queued, job.batch_id)
        return reply.job_id

    def stream(self, job_id: str, timeout_s: float | None = None, *, on_silence: OnSilence | None = None) -> "JobStream":
        """What the job has produced and will produce, from its first token to its end. See `OnSilence`."""
        return JobStream(self, job_id, timeout_s, on_silence)

    def result(
        self, job_id: str, timeout_s: float | None = None, *, check: bool = False, on_silence: OnSilence | None = None
    ) -> Result:
        """Wait for the job's end. See `OnSilence`. Raises `UnknownJob`, `WaitTimeout`, `ServerUnavailable`, and with `check`
        `JobFailed` when the job did not succeed.
        """
        stream = self.stream(job_id, timeout_s, on_silence=on_silence)
        if (result := self._stored(job_id)) is None:
            for _ in stream:
                pass
            result = stream.result
        assert result is not None
        return result.raise_for_state() if check else result

    def generate(self, prompt: str | None = None, *, timeout_s: float | None = None, **fields: Any) -> Result:
        """Put a job in (`enqueue`) and wait for its success; what either raises. After a `WaitTimeout` the job goes on."""
        return self.result(self.enqueue(prompt, **fields), timeout_s, check=True)

    def cancel(self, job_id: str) -> str:
        """Ask for the job's end; the state it is in. It ends soon, with what it has.

        Raises `UnknownJob`, `ServerUnavailable`.
        """
        refuse_unwritable(job_id)
        return self._call(lambda: self._broker.cancel(job_id) or self._cancel_unseen(job_id))

    def state(self, job_id: str) -> str:
        """queued, delayed, running, succeeded, failed, cancelled, expired or dead. Raises `UnknownJob`, `ServerUnavailable`."""
        refuse_unwritable(job_id)
        return self._call(lambda: self._state(job_id))

    def _refuse_unless_taken(self, reply: EnqueueReply, max_queued: int | None, batch_id: str | None) -> None:
        queue = f"queue {self._keys.queue}"
        if reply.status == "cancelled":
            raise InvalidJob("batch_id", batch_id, "of a batch that was not cancelled")
        if reply.status == "closed":
            remedy = f"`worker queue resume --queue {shlex.quote(self._keys.queue)}` reopens it"
            raise QueueClosed(f"{queue}: closed: it takes no jobs while it is drained; {remedy}", CLOSED_S)
        if reply.status == "full":
            bound = "the queue's own limit" if max_queued is None else f"max_queued, {max_queued}, or the queue's own limit"
            again = f"come again in {reply.retry_after_s:g} s"
            raise QueueFull(f"{queue}: full: the jobs that have not ended reach {bound}; {again}", reply.retry_after_s)

    def _cancel_unseen(self, job_id: str) -> str:
        found = self._find(job_id)
        return self._broker.cancel(job_id) or found

    def _state(self, job_id: str) -> str:
        state = self._broker.job(job_id).get("state")
        return self._find(job_id) if state is None else state

    def _find(self, job_id: str) -> str:
        """The state of a job without a hash."""
        stored = self._broker.result(job_id)
        if stored is not None:
            return decode_result(stored).state
        if (state := self._broker.register(job_id)) is not None and state.encode() not in ENDED:
            return state
        raise UnknownJob(f"job {job_id[:128]}: not on queue {self._keys.queue}: it never was, or its result has expired")

    def _stored(self, job_id: str) -> Result | None:
        stored = self._call(lambda: self._broker.result(job_id))
        return None if stored is None else decode_result(stored)

    def _follower(self, job_id: str, deadline: float | None) -> Follower:
        return Follower(self._redis, self._keys, job_id, find=self._find, deadline=deadline, check_s=CHECK_S)

    def _call(self, function: Callable[[], T]) -> T:
        """Call until the server answers. For what is safe to run twice."""
        if self._is_closed:
            raise RuntimeError(CLOSED)
        retry = Retry(self, deadline=None)
        while True:
            try:
                if not self._was_reached:  # so that a lost reply is never taken for a server that is not there
                    self._redis.ping()
                    self._was_reached = True
                answer = function()
            except redis.RedisError as error:
                time.sleep(retry.pause_s(error))
            else:
                retry.reset()
                return answer


class JobStream:
    """The deltas of one job, in order, each token once, whatever becomes of workers and connections; at the end its `result`.

    Iterating raises `UnknownJob` when the queue does not know the job, or no longer does, `WaitTimeout` after `timeout_s`, and
    `ServerUnavailable` when the server stays away. Iterating again begins at the first token again.
    """

    def __init__(
        self, client: Client, job_id: str, timeout_s: float | None = None, on_silence: OnSilence | None = None
    ) -> None:
        refuse_unwritable(job_id)
        self.job_id = job_id
        self.result: Result | None = None
        """Set when the iteration has come to its end."""
        self._client = client
        self._timeout_s = timeout_s
        self._on_silence = on_silence

    def __iter__(self) -> Iterator[Delta]:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        retry = Retry(self._client, deadline)
        follower = self._client._follower(self.job_id, deadline)
        while follower.result is None:
            try:
                yield from self._follow(follower, retry)
            except redis.RedisError as error:
                time.sleep(retry.pause_s(error))
        self.result = follower.result

    def text(self, choice: int = 0) -> Iterator[str]:
        """The text of a choice as it comes, each character once.

        A restart is not seen, as attempts answer alike; where one does not, this raises `TextChanged`, and at the end
        `JobFailed` when the job did not succeed.
        """
        shown = Shown(choice)
        for delta in self:
            if new := shown.add(delta):
                yield new
        assert self.result is not None
        self.result.raise_for_state()

    def _follow(self, follower: Follower, retry: "Retry") -> Iterator[Delta]:
        steps, answer = follower.follow(), None
        with _Ear(self._client._redis) as ear:
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration:
                    return
                answer = None
                if isinstance(step, Delta):
                    yield step
                elif isinstance(step, Hear):
                    answer = ear.hear(step)
                elif isinstance(step, Silence):
                    if self._on_silence is not None:
                        self._on_silence(step.state)
                else:
                    answer = step()
                    retry.reset()


class _Ear:
    """The subscription of one stream: to the channel that was asked for last."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._channel: str | None = None
        self._subscription: PubSub | None = None

    def __enter__(self) -> "_Ear":
        return self

    def __exit__(self, *_: object) -> None:
        if self._subscription is not None:
            self._subscription.close()

    def hear(self, wanted: Hear) -> tuple[str, bytes] | None:
        """See `Hear`."""
        if wanted.channel != self._channel:
            self.__exit__()
            self._channel, self._subscription = wanted.channel, subscribe(self._client, wanted.channel)
        assert self._subscription is not None
        return hear(self._subscription, wanted.wait_s)


class Retry:
    """Pauses between attempts to reach the server, and when to stop trying."""

    def __init__(self, client: Client, deadline: float | None) -> None:
        self._client = client
        self._deadline = deadline
        self._failures = 0
        self._failing_since = 0.0

    def reset(self) -> None:
        """The server has answered."""
        self._failures = 0
        self._client._was_reached = True

    def pause_s(self, error: redis.RedisError) -> float:
        """How long to wait; `ServerUnavailable` instead, when the error will not pass or the time is up."""
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
        until = min(self._failing_since + self._client._patience_s, self._deadline or float("inf"))
        pause_s: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._failures) * random.uniform(0.5, 1.0)
        self._failures = min(self._failures + 1, 10)
        if not self._may_pass(error) or now + pause_s > until:
            raise unavailable(self._client._redis, error) from None
        return pause_s

    def _may_pass(self, error: redis.RedisError) -> bool:
        if isinstance(error, (redis.AuthenticationError, AuthorizationError)):
            return False
        if isinstance(error, (redis.BusyLoadingError, redis.ReadOnlyError, redis.OutOfMemoryError)):
            return True
        if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
            return self._client._was_reached
        return (error.status_code or str(error)).startswith(_PASSING)


def from_env() -> tuple[str, str]:
    """The server and the queue that the environment names, as for the commands."""
    return os.environ.get("SLOTMILL_REDIS_URL") or DEFAULT_REDIS_URL, os.environ.get("SLOTMILL_QUEUE") or DEFAULT_QUEUE


def _plain(messages: object) -> object:
    """Messages of any mapping and sequence types as dicts in a list; what is neither stays, for the check to refuse."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages
    return [dict(message) if isinstance(message, Mapping) else message for message in messages]


def _check_bounds(idempotency_key: object, max_queued: object, delay_s: object) -> None:
    if idempotency_key is not None:
        if type(idempotency_key) is not str:
            raise InvalidJob("idempotency_key", type(idempotency_key).__name__, "text of 1 to 512 characters")
        if not 1 <= len(idempotency_key) <= 512 or has_lone_surrogate(idempotency_key):
            raise InvalidJob("idempotency_key", f"text of {len(idempotency_key)}", "1 to 512 characters")
    if max_queued is not None and (type(max_queued) is not int or not 0 <= max_queued <= 2**53):
        raise InvalidJob("max_queued", type(max_queued).__name__, "an integer of 0 or more")
    if type(delay_s) not in (int, float):
        raise InvalidJob("delay_s", type(delay_s).__name__, "a number of seconds")
    if not 0 <= delay_s <= MAX_DELAY_S:  # type: ignore[operator]  # which NaN is not either
        raise InvalidJob("delay_s", delay_s, f"0 to {MAX_DELAY_S}, which is {MAX_DELAY_S // 86_400} days")


def refuse_unwritable(job_id: str) -> None:
    """`UnknownJob` for an id that no key can hold."""
    if not isinstance(job_id, str):
        raise UnknownJob(f"job {job_id!r:.64}: an id is text")
    if has_lone_surrogate(job_id):
        raise UnknownJob(f"job {job_id[:128]!r}: no id can hold a lone surrogate")
