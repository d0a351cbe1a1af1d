"""The client library for an event loop: the calls of `worker/client.py`, awaited.

What asks the server runs on a few threads of a `Client`, with its retries and refusals; following a job takes no thread, and
all streams share one connection (`worker/switchboard.py`). Imported as `from worker.client import AsyncClient`.

    async with AsyncClient("redis://127.0.0.1:6379") as client:
        stream = client.stream(await client.enqueue("Why is the sky blue?", max_tokens=64))
        async for text in stream.text():
            print(text, end="")
        print(stream.result.usage)
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import redis

from worker.client import CLOSED, Client, Retry, from_env, refuse_unwritable
from worker.deltas import Delta, Shown
from worker.follower import Follower, Hear, Silence
from worker.frames import Result
from worker.keys import DEFAULT_QUEUE
from worker.switchboard import Ear, Heard, Switchboard

NUM_THREADS = 8
"""Calls that wait for the server at a time, and so connections beside the one that hears; other calls wait for their turn."""

T = TypeVar("T")


class AsyncClient:
    """One queue as producers and readers see it, for the tasks of one event loop. See `Client` for arguments, calls and errors.

    A cancelled call may still reach the server; a stream that is left, or whose task is cancelled, leaves nothing behind.
    """

    def __init__(
        self, server: "str | redis.Redis", queue: str = DEFAULT_QUEUE, *, patience_s: float = 30.0, threads: int = NUM_THREADS
    ) -> None:
        """See `Client`; also a client that is given is redis-py's synchronous one. `threads`: see `NUM_THREADS`."""
        self._client = Client(server, queue, patience_s=patience_s)
        self._threads = ThreadPoolExecutor(threads, "slotmill-client")
        self._is_closed = False
        self._switchboard = Switchboard(self._client._redis)

    @classmethod
    def from_env(cls, *, patience_s: float = 30.0) -> "AsyncClient":
        """See `Client.from_env`."""
        return cls(*from_env(), patience_s=patience_s)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close what this client opened, once the calls that have begun are over."""
        self._is_closed = True
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._client.close()

    async def enqueue(self, prompt: str | None = None, **fields: Any) -> str:
        """See `Client.enqueue`."""
        return await self._run(partial(self._client.enqueue, prompt, **fields))

    async def generate(self, prompt: str | None = None, *, timeout_s: float | None = None, **fields: Any) -> Result:
        """See `Client.generate`."""
        return await self.result(await self.enqueue(prompt, **fields), timeout_s, check=True)

    def stream(self, job_id: str, timeout_s: float | None = None) -> "AsyncJobStream":
        """See `Client.stream`."""
        return AsyncJobStream(self, job_id, timeout_s)

    async def result(self, job_id: str, timeout_s: float | None = None, *, check: bool = False) -> Result:
        """See `Client.result`."""
        stream = self.stream(job_id, timeout_s)
        if (result := await self._run(partial(self._client._stored, job_id))) is None:
            async for _ in stream:
                pass
            result = stream.result
        assert result is not None
        return result.raise_for_state() if check else result

    async def cancel(self, job_id: str) -> str:
        """See `Client.cancel`."""
        return await self._run(partial(self._client.cancel, job_id))

    async def state(self, job_id: str) -> str:
        """See `Client.state`."""
        return await self._run(partial(self._client.state, job_id))

    async def _run(self, call: Callable[[], T]) -> T:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class AsyncJobStream:
    """See `JobStream`. Left early, as by `break`, it gives its channel back as soon as nobody holds the iterator."""

    def __init__(self, client: AsyncClient, job_id: str, timeout_s: float | None = None) -> None:
        refuse_unwritable(job_id)
        self.job_id = job_id
        self.result: Result | None = None
        """Set when the iteration has come to its end."""
        self._client = client
        self._timeout_s = timeout_s

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        retry = Retry(self._client._client, deadline)
        follower = self._client._client._follower(self.job_id, deadline)
        while follower.result is None:
            try:
                async with contextlib.aclosing(self._follow(follower, retry)) as deltas:
                    async for delta in deltas:
                        yield delta
            except redis.RedisError as error:
                await asyncio.sleep(retry.pause_s(error))
        self.result = follower.result

    async def text(self, choice: int = 0) -> AsyncGenerator[str, None]:
        """See `JobStream.text`."""
        shown = Shown(choice)
        async with contextlib.aclosing(self.__aiter__()) as deltas:
            async for delta in deltas:
                if new := shown.add(delta):
                    yield new
        assert self.result is not None
        self.result.raise_for_state()

    async def _follow(self, follower: Follower, retry: Retry) -> AsyncGenerator[Delta, None]:
        steps, answer = follower.follow(), None
        with _Tuned(self._client._switchboard) as ear:
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration:
                    return
                answer = None
                if isinstance(step, Delta):
                    yield step
                elif isinstance(step, Hear):
                    answer = await ear.hear(step)
                elif not isinstance(step, Silence):
                    answer = await self._client._run(step)
                    retry.reset()


class _Tuned:
    """The ear of one stream: on the channel that was asked for last."""

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        self._channel: str | None = None
        self._ear: Ear | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "_Tuned":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    async def hear(self, wanted: Hear) -> Heard | None:
        """See `Hear`."""
        if wanted.channel != self._channel:
            self._open.close()
            self._ear = self._open.enter_context(self._switchboard.listen(wanted.channel))
            self._channel = wanted.channel
        assert self._ear is not None
        return await self._ear.hear(wanted.wait_s)
