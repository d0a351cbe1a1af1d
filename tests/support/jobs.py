"""Jobs as any producer writes them, and what the protocol lets anyone read back: results, logs, channels."""

import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgpack
import redis

from engine.request import Grammar, Request, SamplingParams
from tests.support import fake_engine
from tests.support.wait import wait_until
from worker.frames import ControlFrame, Frame, Result, TokenFrame, decode_frame, decode_result
from worker.keys import Keys


class Producer:
    """Writes entries to a queue's lanes with XADD and reads what comes of them."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self.client = client
        self.keys = Keys(queue)

    def add(self, job_id: str | None = None, *, lane: str = "normal", **body: object) -> str:
        """Enqueue a body, greedy unless it says otherwise; the job's id."""
        job_id = job_id or uuid.uuid4().hex
        return self.add_raw(job_id, msgpack.packb({"temperature": 0} | body), lane=lane)

    def add_raw(self, job_id: str, packed: bytes, *, lane: str = "normal") -> str:
        self.client.xadd(self.keys.lane(lane), {"v": "1", "id": job_id, "m": packed})
        return job_id

    def add_json(self, **body: object) -> str:
        """What redis-cli would send; the id is the entry's."""
        entry: bytes = self.client.xadd(self.keys.lane("normal"), {"j": json.dumps(body)})
        return entry.decode()

    def result(self, job_id: str, timeout_s: float = 10.0) -> Result:
        key = self.keys.result(job_id)
        stored: bytes = wait_until(lambda: self.client.get(key), timeout_s, f"a result of {job_id}")
        return decode_result(stored)

    def state(self, job_id: str) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.client.hgetall(self.keys.job(job_id)).items()}

    def log(self, job_id: str) -> list[Frame]:
        return [decode_frame(fields[b"m"]) for _, fields in self.client.xrange(self.keys.log(job_id))]

    def num_logged(self, job_id: str) -> int:
        return int(self.client.hget(self.keys.job(job_id), "n") or 0)

    def entries(self) -> int:
        return sum(self.client.xlen(lane) for lane in self.keys.lanes)

    @contextmanager
    def listening(self, job_ids: Sequence[str]) -> Iterator[dict[str, list[Frame]]]:
        """What the channels of these jobs carry from now on."""
        heard: dict[str, list[Frame]] = {job_id: [] for job_id in job_ids}
        channels = {self.keys.channel(job_id).encode(): heard[job_id] for job_id in job_ids}
        pubsub = self.client.pubsub(ignore_subscribe_messages=True)
        pubsub.subscribe(*channels)
        left = threading.Event()

        def listen() -> None:
            while not left.is_set():
                if message := pubsub.get_message(timeout=0.05):
                    channels[message["channel"]].append(decode_frame(message["data"]))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield heard
        finally:
            left.set()
            thread.join()
            pubsub.close()


def words(token_ids: Sequence[int]) -> str:
    """The text of the fake model's tokens after a prompt."""
    return "".join(f" w{token_id}" for token_id in token_ids)


def answer(prompt: str, num_tokens: int, choice: int = 0, grammar: Grammar | None = None) -> list[int]:
    """The fake engine's greedy answer, in this choice of several."""
    prompt_ids = tuple(int(word[1:]) for word in prompt.split())
    request = Request(request_id="", prompt_token_ids=prompt_ids, params=SamplingParams(temperature=0, grammar=grammar))
    return [fake_engine.next_token(request, index, choice) for index in range(num_tokens)]


def answer_of_choice(prompt: str, max_tokens: int, choice: int) -> list[int]:
    """The same of a job of several choices, of which the later ones end by themselves."""
    if not choice:
        return answer(prompt, max_tokens)
    return [*answer(prompt, max_tokens - 1 - 5 * choice, choice), fake_engine.EOS_ID]


def token_ids(frames: Sequence[Frame], choice: int = 0) -> list[int]:
    """The tokens of a stream; AssertionError unless ids and text follow each other without gap or repetition."""
    ids: list[int] = []
    text = ""
    for frame in frames:
        if isinstance(frame, TokenFrame) and frame.choice == choice:
            assert (frame.index, frame.offset) == (len(ids), len(text)), f"{frame} does not follow {len(ids)} tokens"
            ids += frame.token_ids
            text += frame.text
    return ids


def text(frames: Sequence[Frame], choice: int = 0) -> str:
    return "".join(frame.text for frame in frames if isinstance(frame, TokenFrame) and frame.choice == choice)


def events(frames: Sequence[Frame]) -> list[str]:
    return [frame.event for frame in frames if isinstance(frame, ControlFrame)]
