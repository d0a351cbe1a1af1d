"""One attempt at a job, played by hand; readers of streams on threads of their own; many of them with the fake engine."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from tests.support.jobs import Producer, answer, events, token_ids
from tests.support.wait import wait_until
from worker.broker import Broker
from worker.claims import Delivery, Emission, Finish
from worker.client import Client, Delta
from worker.errors import SlotmillError
from worker.frames import Choice, ControlFrame, Frame, Result, TokenFrame, Usage, encode_frame, encode_result

Listens = Callable[..., None]
"""listens(job_id, count): returns once that many connections have subscribed to a job's channel."""


@dataclass
class Work:
    """One attempt at a job, played by hand. Token k is 100 + k, its text the k-th letter."""

    broker: Broker
    delivery: Delivery
    n: int = 0
    streams: bool = True
    statuses: list[str] = field(default_factory=list)

    @classmethod
    def claim(cls, broker: Broker) -> "Work":
        [delivery] = wait_until(lambda: broker.fetch(1), message="a job to claim")
        work = cls(broker, delivery, delivery.num_logged)
        work.emit(ControlFrame(delivery.attempt, "start"), 0)
        return work

    def emit(self, frame: Frame, num_tokens: int, publish: bool = True) -> None:
        job = self.delivery
        data = encode_frame(frame)
        emission = Emission(job.job_id, job.lease, job.attempt, self.n, self.n + num_tokens, data, publish and self.streams)
        self.statuses.append(self.broker.emit([emission])[0].status)
        self.n += num_tokens

    def tokens(self, count: int = 1, reason: str | None = None, publish: bool = True) -> None:
        start, stop = self.n, self.n + count
        self.emit(
            TokenFrame(self.delivery.attempt, 0, start, ids(start, stop), text(start, stop), start, reason), count, publish
        )

    def finish(self, state: str = "succeeded", reason: str = "stop", choices: bool = True) -> Result:
        job = self.delivery
        given = (Choice(0, text(0, self.n), ids(0, self.n), reason),) if choices else ()
        result = Result(id=job.job_id, state=state, choices=given, usage=Usage(5, self.n), worker="me")
        end = ControlFrame(job.attempt, "end", state, "", result.usage)
        assert self.broker.finish([Finish(job, state, "", encode_result(result), encode_frame(end), expected_n=self.n)]) == [
            "ok"
        ]
        return result


def ids(start: int, stop: int) -> tuple[int, ...]:
    return tuple(range(100 + start, 100 + stop))


def text(start: int, stop: int) -> str:
    return "".join(chr(0x4E00 + k) for k in range(start, stop))


class Reader:
    """Reads a stream on a thread of its own, and checks that each delta begins where the last one ended."""

    def __init__(self, client: Client, job_id: str, timeout_s: float | None = 30.0) -> None:
        self.stream = client.stream(job_id, timeout_s)
        self.deltas: list[Delta] = []
        self.error: Exception | None = None
        self.ids: list[int] = []
        self.text = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for delta in self.stream:
                self._take(delta)
        except (SlotmillError, redis.RedisError, AssertionError) as error:
            self.error = error

    def _take(self, delta: Delta) -> None:
        if delta.is_restart:
            self.ids, self.text = self.ids[: delta.index], self.text[: delta.offset]
        assert (delta.index, delta.offset) == (len(self.ids), len(self.text)), delta
        self.ids += delta.token_ids
        self.text += delta.text
        self.deltas.append(delta)

    def wait_for(self, num_tokens: int) -> None:
        wait_until(lambda: len(self.ids) >= num_tokens or self.error, message=f"{num_tokens} tokens read")

    def join(self) -> "Reader":
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stream does not end"
        if self.error:
            raise self.error
        return self

    def holds(self, result: Result) -> bool:
        [choice] = result.choices
        return (tuple(self.ids), self.text, self.stream.result) == (choice.token_ids, choice.text, result)


class Streams:
    """Jobs of the fake engine, each followed by a client."""

    def __init__(self, client: Client, count: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        prompts = [f"w{i} w9" for i in range(2, 2 + count)]
        self.readers = {prompt: self._follow(client, prompt) for prompt in prompts}

    def _follow(self, client: Client, prompt: str) -> Reader:
        return Reader(client, client.enqueue(prompt, max_tokens=self.max_tokens, temperature=0))

    def wait_for(self, num_tokens: int) -> None:
        for reader in self.readers.values():
            reader.wait_for(num_tokens)

    def check(self, producer: Producer) -> None:
        """Each came to its end, whole; AssertionError else."""
        for prompt, reader in self.readers.items():
            expected = answer(prompt, self.max_tokens)
            assert reader.join().ids == expected
            frames = producer.log(reader.stream.job_id)
            assert (token_ids(frames), events(frames).count("end")) == (expected, 1)
        ended = [fields[b"id"].decode() for _, fields in producer.client.xrange(producer.keys.done)]
        assert sorted(ended) == sorted(reader.stream.job_id for reader in self.readers.values())
