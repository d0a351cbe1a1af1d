"""Connected clients that keep a queue busy, and the comparison of what each was told with the undisturbed answer.

Relies on the client library as any program does, and on the fake engine's rule for what is right. Leaves to `chaos` what
happens to workers and server meanwhile.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import redis

from engine.request import Grammar, GrammarKind, Request, SamplingParams
from tests.support import fake_engine
from tests.support.jobs import Producer, events, words
from worker.client import Client, Delta
from worker.frames import Result

STREAM_S = 120.0
"""No job of a few seconds is disturbed for longer than this."""
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Asked:
    """A job, and for each of its choices the ids and the text that an undisturbed run gives (no texts: not known)."""

    kind: str
    body: dict[str, Any]
    ids: list[list[int]]
    texts: list[str] | None = None


def fake_answer(prompt: str, params: SamplingParams) -> list[list[int]]:
    """What the fake engine makes of a prompt, all choices or beams."""
    request = Request(request_id="", prompt_token_ids=tuple(int(word[1:]) for word in prompt.split()), params=params)
    answers = []
    for choice in range(max(params.n, params.beam_width)):
        ids = [fake_engine.next_token(request, index, choice) for index in range(params.max_tokens)]
        if fake_engine.EOS_ID in ids and not params.beam_width:
            ids = ids[: ids.index(fake_engine.EOS_ID) + 1]
        answers.append(ids)
    return answers


def visible(ids: list[int]) -> str:
    return words([token_id for token_id in ids if token_id != fake_engine.EOS_ID])


def fake_jobs(draw: random.Random) -> Iterator[Asked]:
    """Jobs of every kind that the fake engine knows, for ever."""
    for number in count():
        prompt = f"w{draw.randrange(80, 100)} w{draw.randrange(20, 100)}"  # `w1...` would hold the word that ends a text
        num_tokens = draw.randint(20, 80)
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        match number % 8:
            case 0:
                yield _asked("sampled", body | {"temperature": 1.0, "seed": draw.getrandbits(60)})
            case 1:
                yield _asked("choices", body | {"n": 2})
            case 2:
                yield _stopped(body, at=draw.randrange(5, num_tokens - 1))
            case 3:
                yield _asked("silent", body | {"stream": False})
            case 4:
                # shorter, since it starts over every time
                yield _asked("beams", {"prompt": prompt, "max_tokens": num_tokens // 2, "seed": 0, "beam_width": 2})
            case 5:
                yield _asked("formatted", body | {"response_format": {"type": "regex", "regex": "[a-z]+"}})
            case 6:
                yield _asked("scored", body | {"logprobs": 1})
            case _:
                yield _asked("greedy", body)


def _asked(kind: str, body: dict[str, Any]) -> Asked:
    shared = {name: body[name] for name in ("max_tokens", "temperature", "seed", "n", "beam_width") if name in body}
    grammar = Grammar(GrammarKind.REGEX, body["response_format"]["regex"]) if "response_format" in body else None
    ids = fake_answer(body["prompt"], SamplingParams(grammar=grammar, **shared))
    return Asked(kind, body, ids, [visible(of_one) for of_one in ids])


def _stopped(body: dict[str, Any], at: int) -> Asked:
    """Ends where tokens `at - 1` and `at` stand together; the fake engine repeats itself after more than 80 tokens only."""
    ids = fake_answer(body["prompt"], SamplingParams(max_tokens=body["max_tokens"], temperature=0))[0][: at + 1]
    stop = f" w{ids[-2]} w{ids[-1]}"
    return Asked("stopped", body | {"stop": stop}, [ids], [words(ids[:-2])])


@dataclass
class Told:
    """What one connected client was told of one job."""

    job_id: str
    asked: Asked
    deltas: list[Delta] = field(default_factory=list)
    result: Result | None = None
    error: str = ""

    def follow(self, client: Client) -> None:
        """Enqueue it and listen to its end."""
        job_id = client.enqueue(id=self.job_id, max_attempts=20, **self.asked.body)
        stream = client.stream(job_id, STREAM_S)
        for delta in stream:
            self.deltas.append(delta)
        self.result = stream.result

    def faults(self) -> list[str]:
        """How it differs from an undisturbed run, a line each."""
        return [f"{self.job_id}: {fault}" for fault in self._faults()]

    def _faults(self) -> list[str]:
        if self.error or self.result is None:
            return [f"no end: {self.error or 'none came'}"]
        if self.result.state != "succeeded":
            return [f"{self.result.state}: {self.result.error}"]
        held = Held()
        found = [fault for delta in self.deltas for fault in held.add(delta)]
        choices = self.result.choices
        ids, texts = [list(choice.token_ids) for choice in choices], [choice.text for choice in choices]
        if ids != self.asked.ids:
            found.append(f"the result's ids are not the undisturbed ones: {_first_difference(ids, self.asked.ids)}")
        if texts != (self.asked.texts or texts):
            found.append(f"the result's texts are {texts}, not {self.asked.texts}")
        for choice in choices:
            if (held.ids.get(choice.index), held.text.get(choice.index)) != (list(choice.token_ids), choice.text):
                found.append(f"choice {choice.index}: the stream is not the result: {held.ids.get(choice.index)}")
            if held.reasons.get(choice.index) != [choice.finish_reason]:
                found.append(
                    f"choice {choice.index}: told reasons {held.reasons.get(choice.index)}, not {choice.finish_reason}"
                )
        return found


def _first_difference(found: list[list[int]], wanted: list[list[int]]) -> str:
    """Where two lists of choices part."""
    if len(found) != len(wanted):
        return f"{len(found)} choices, not {len(wanted)}"
    for choice, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
            sizes = f"{len(ours)} tokens, not {len(theirs)}"
            return f"choice {choice} from token {at} on: {ours[at : at + 5]}, not {theirs[at : at + 5]}; {sizes}"
    return ""


class Held:
    """What a reader of deltas holds, who trusts them to follow each other."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.reasons: dict[int, list[str]] = {}

    def add(self, delta: Delta) -> list[str]:
        """Take it in; a fault for a gap or a repetition."""
        ids, text = self.ids.setdefault(delta.choice, []), self.text.setdefault(delta.choice, "")
        reasons = self.reasons.setdefault(delta.choice, [])
        if delta.is_restart:
            del ids[delta.index :], reasons[:]
            self.text[delta.choice] = text[: delta.offset]
            return []
        found = []
        if (delta.index, delta.offset) != (len(ids), len(text)):
            found = [f"choice {delta.choice}: {(delta.index, delta.offset)} follows {(len(ids), len(text))}"]
        ids += delta.token_ids
        self.text[delta.choice] = text + delta.text
        reasons += [delta.finish_reason] if delta.finish_reason else []
        return found


class Load:
    """Clients, each in a thread and on a connection of its own, that ask one thing after another until told to stop."""

    def __init__(self, url: str, queue: str, jobs: Iterator[Asked], num_clients: int) -> None:
        self._url, self._queue, self._jobs = url, queue, jobs
        self._lock = threading.Lock()
        self._leave = threading.Event()
        self.told: list[Told] = []
        self._threads = [threading.Thread(target=self._run, name=f"client-{i}") for i in range(num_clients)]
        for thread in self._threads:
            thread.start()

    @property
    def open(self) -> list[Told]:
        """Jobs that have not ended as far as their clients know."""
        with self._lock:
            return [told for told in self.told if told.result is None and not told.error]

    @property
    def num_ended(self) -> int:
        return len(self.told) - len(self.open)

    def finish(self, timeout_s: float = 2 * STREAM_S) -> list[Told]:
        """Ask nothing new, wait for the ends of what was asked."""
        self._leave.set()
        for thread in self._threads:
            thread.join(timeout_s)
        assert not any(thread.is_alive() for thread in self._threads), "a client waits for ever"
        return self.told

    def _run(self) -> None:
        with Client(self._url, self._queue, patience_s=PATIENCE_S) as client:
            while not self._leave.is_set() and (told := self._next()):
                try:
                    told.follow(client)
                except Exception as error:  # noqa: BLE001  it is reported with the others
                    told.error = f"{type(error).__name__}: {error}"

    def _next(self) -> Told | None:
        with self._lock:
            asked = next(self._jobs, None)
            if asked is not None:
                self.told.append(Told(f"{asked.kind}-{len(self.told)}", asked))
            return self.told[-1] if asked else None


def faults_of_queue(client: redis.Redis, queue: str, told: list[Told]) -> list[str]:
    """What the queue itself should not hold once all of these have ended: more or fewer ends than jobs, and leftovers."""
    producer = Producer(client, queue)
    ends = Counter(fields[b"id"].decode() for _, fields in client.xrange(producer.keys.done))
    found = [
        f"{of_one.job_id}: {ends[of_one.job_id]} rows in done, {producer.state(of_one.job_id)}"
        for of_one in told
        if ends[of_one.job_id] != 1
    ]
    for of_one in told:
        if (num_ends := events(producer.log(of_one.job_id)).count("end")) != 1:
            found.append(f"{of_one.job_id}: {num_ends} end frames")
    if ends.total() != len(told):
        found.append(f"{ends.total()} rows in done, {len(told)} jobs")
    if entries := producer.entries():
        found.append(f"{entries} entries are left in the lanes")
    return found
