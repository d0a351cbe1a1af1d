"""Many channels heard over one connection, for an event loop.

Relies on the connections of `worker/connection.py`, whatever kind of server they reach: they belong to threads, so one thread
of the switchboard's own is the only one that sends and reads on them, and the loop watches their file in between. Leaves what a
message means to who listens, and so reconnecting: a lost connection is an error for all who were listening.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis
from redis.client import PubSub

from worker.connection import MOVED, add_channel, descriptor, drop_channel, receive, subscribe

MAX_HEARD = 1024
"""Messages that wait for a slow listener. What comes beyond them is dropped; he finds the gap, and reads the log."""
MAX_RECEIVED = 1024
"""Messages that are read at a time."""
LOOK_S = 1.0
"""A connection that redis-py has made anew by itself is noticed within this time."""

Heard = tuple[str, bytes]
Wish = Callable[[Any, PubSub, str], None]


class Ear:
    """What one listener of a channel has not taken yet."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[Heard | redis.RedisError] = asyncio.Queue(MAX_HEARD)

    def put(self, item: Heard | redis.RedisError) -> None:
        """Add what was heard, or why nothing will be any more."""
        if self._heard.full():
            if not isinstance(item, redis.RedisError):
                return
            self._heard.get_nowait()
        self._heard.put_nowait(item)

    async def hear(self, wait_s: float) -> Heard | None:
        """As `connection.hear`."""
        try:
            async with asyncio.timeout(wait_s):
                item = await self._heard.get()
        except TimeoutError:
            return None
        if isinstance(item, redis.RedisError):
            raise item
        return item


class Switchboard:
    """Makes a line when somebody wants to listen and there is none. For one event loop."""

    def __init__(self, client: Any) -> None:
        """`client` makes the connections."""
        self._client = client
        self._line: _Line | None = None

    @contextlib.contextmanager
    def listen(self, channel: str) -> Iterator[Ear]:
        """An ear on a channel; a `subscribe` comes first, once the server has confirmed it. Needs a running loop."""
        if self._line is None or self._line.is_over:
            self._line = _Line(self._client)
        line, ear = self._line, Ear()
        line.add(channel, ear)
        try:
            yield ear
        finally:
            line.remove(channel, ear)


class _Line:
    """One connection's life: from its first ear until the last one has gone, or the connection is lost.

    1. The thread works only while the task waits for it: nothing closes a file that the loop watches.
    2. Adding and removing an ear does not wait, so a task may be cancelled at any time.
    """

    def __init__(self, client: Any) -> None:
        self.is_over = False
        self._client = client
        self._ears: dict[str, set[Ear]] = {}
        self._confirmed: set[str] = set()
        self._wishes: list[tuple[Wish, str]] = []
        self._something = asyncio.Event()
        """To be read or to be wished for."""
        self._subscription: PubSub | None = None
        self._thread = ThreadPoolExecutor(1, "slotmill-switchboard")
        self._listening = asyncio.create_task(self._listen())

    def add(self, channel: str, ear: Ear) -> None:
        ears = self._ears.setdefault(channel, set())
        ears.add(ear)
        if channel in self._confirmed:
            ear.put(("subscribe", b""))
        elif len(ears) == 1:
            self._wish(add_channel, channel)

    def remove(self, channel: str, ear: Ear) -> None:
        ears = self._ears[channel]
        ears.discard(ear)
        if not ears:
            del self._ears[channel]
            self._confirmed.discard(channel)
            self._wish(drop_channel, channel)
        if not self._ears and not self.is_over:
            self._listening.cancel()
            self._hang_up()

    def _wish(self, wish: Wish, channel: str) -> None:
        self._wishes.append((wish, channel))
        self._something.set()

    def _hang_up(self) -> None:
        self.is_over = True
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    async def _listen(self) -> None:
        try:
            while True:
                await self._readable()
                wishes, self._wishes = self._wishes, []
                received = await asyncio.wrap_future(self._thread.submit(self._work, wishes))
                for kind, channel, data in received:
                    self._pass_on(kind, channel, data)
                if len(received) == MAX_RECEIVED:
                    self._something.set()  # more of it may have left the file already
        except (redis.RedisError, OSError) as error:
            self._hang_up()
            lost = error if isinstance(error, redis.RedisError) else redis.ConnectionError(str(error))
            for ear in [ear for ears in self._ears.values() for ear in ears]:
                ear.put(lost)

    async def _readable(self) -> None:
        if self._subscription is None:
            await self._something.wait()
        else:
            loop, number = asyncio.get_running_loop(), descriptor(self._subscription)
            loop.add_reader(number, self._something.set)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._something.wait()
            except TimeoutError:
                pass
            finally:
                loop.remove_reader(number)
        self._something.clear()

    def _pass_on(self, kind: str, channel: str, data: bytes) -> None:
        ears = self._ears.get(channel, set())
        if kind == "sunsubscribe" and ears:
            raise redis.ConnectionError(MOVED)
        if kind == "subscribe":
            self._confirmed.update([channel] if ears else [])
        elif kind != "message":
            return
        for ear in ears:
            ear.put((kind, data))

    # On the thread

    def _work(self, wishes: list[tuple[Wish, str]]) -> list[tuple[str, str, bytes]]:
        for wish, channel in wishes:
            if self._subscription is None:
                self._subscription = subscribe(self._client, channel)
            else:
                wish(self._client, self._subscription, channel)
        assert self._subscription is not None  # the first wish was to add a channel
        received: list[tuple[str, str, bytes]] = []
        while len(received) < MAX_RECEIVED and (message := receive(self._subscription, 0.0)) is not None:
            received.append(message)
        return received

    def _close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
