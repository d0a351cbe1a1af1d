"""`worker demo`: a real server, a real worker and a small real model; a dozen prompts, and where the slots went.

Relies on the embedded server, the client library, and for slots, blocks and preemptions on the worker's own `/metrics`. Leaves
what it looks like to `worker/demo_view.py`. Signals set a flag that the main thread looks at between short waits: no exception
comes out of the blue, so nothing that was started can be forgotten.
"""

import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import psutil
import redis
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live

from worker import demo_view as view
from worker.client import Client
from worker.command import CANCELLED, FAILED, OK
from worker.connection import connect, unavailable
from worker.demo_view import Answer, Figures
from worker.embedded import EmbeddedServer, die_with_parent, free_port
from worker.errors import EngineUnavailable, SlotmillError
from worker.keys import Keys
from worker.settings import DEFAULT_MODEL

NUM_SLOTS = 4
"""Fewer than prompts, so that there is something to schedule; as many as panels of a terminal of 80 columns."""
TICK_S = 0.2
STOP_GRACE_S = 10.0
"""A worker without a drain leaves in a second or two; one that does not is killed, and its engine with it."""

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business on the loopback

Counts = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question, how long its answer may get, and how it is sampled."""

    text: str
    max_tokens: int
    temperature: float = 0.0


PROMPTS = (
    Prompt("What is the capital of France?", 24),
    Prompt("Write a short story about a lighthouse keeper who finds a message in a bottle.", 120, 0.6),
    Prompt("What is 7 plus 5? Answer with the number only.", 16),
    Prompt("Describe how a bicycle stays upright, for a ten-year-old.", 96, 0.6),
    Prompt("Give me a recipe for pancakes, step by step.", 112, 0.6),
    Prompt("Which is the largest ocean on Earth?", 32),
    Prompt("Explain in two sentences why the sky is blue.", 64),
    Prompt("Write a haiku about autumn rain.", 32, 0.6),
    Prompt("List five things to pack for a week in the mountains.", 72),
    Prompt("What is the chemical symbol for gold?", 48),
    Prompt("Write one sentence about the sea.", 40),
    Prompt("Give me a good name for a bakery, and say why.", 40),
)
"""Short and long answers mixed, so that a batch that waits for its longest one would idle for all to see."""


class _CancelledError(Exception):
    """A signal came."""


class _Stop:
    """Whether a signal came. A plain flag: a handler may run while this very thread holds the lock of an Event."""

    requested = False

    def request(self, *_: object) -> None:
        self.requested = True


def run(
    *,
    model: str = DEFAULT_MODEL,
    redis_url: str | None = None,
    gpu: int | None = None,
    cpu: bool = False,
    num_prompts: int = len(PROMPTS),
    max_tokens: int | None = None,
    plain: bool | None = None,
    console: Console | None = None,
) -> int:
    """Run the demo and clear everything away again; the exit code (0, 1 when an answer failed, 3 after Ctrl-C).

    `redis_url` is a server to use instead of the embedded one. `gpu` or `cpu` as for `worker start`. `num_prompts` and
    `max_tokens` make it shorter. `plain` asks for lines instead of panels; None decides by the terminal. Raises
    `ServerUnavailable`, and `EngineUnavailable` with the worker's own reason.
    """
    console = console or _console()
    live = console.is_terminal and not plain
    device = ["--cpu"] if cpu else [] if gpu is None else ["--gpu", str(gpu)]
    try:
        with _signals() as stop, _queue(redis_url) as (url, queue):
            arguments = ["--model", model, "--redis-url", url, "--queue", queue, "--max-slots", str(NUM_SLOTS), *device]
            with _Worker(arguments, stop) as worker:
                _wait_until_ready(worker, model, console, live=live)
                client = Client(url, queue)
                answers = _enqueue(client, PROMPTS[:num_prompts], max_tokens)
                figures = _follow_all(worker, client, answers, console, live=live)
                client.close()
    except _CancelledError:
        console.print("cancelled; nothing is left running")
        return CANCELLED
    console.print(view.summary(figures))
    return OK if all(answer.state == "succeeded" for answer in answers) else FAILED


def _console() -> Console:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    return Console(highlight=False)


@contextmanager
def _signals() -> Iterator[_Stop]:
    """A flag that SIGINT, SIGTERM and SIGHUP set, for as long as the context lasts."""
    stop = _Stop()
    before = {number: signal.signal(number, stop.request) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _queue(redis_url: str | None) -> Iterator[tuple[str, str]]:
    """A server's URL and the name of a queue of our own, whose keys are gone afterwards."""
    queue = f"demo-{uuid.uuid4().hex[:8]}"
    if redis_url is None:
        with EmbeddedServer() as server:
            yield server.url, queue
        return
    with connect(redis_url, queue) as client:
        try:
            client.ping()  # before a model is loaded for nothing
        except redis.RedisError as error:
            raise unavailable(client, error) from None
        try:
            yield redis_url, queue
        finally:
            for key in client.scan_iter(match=f"{Keys(queue).prefix}*", count=1000):
                client.delete(key)


class _Worker:
    """A real worker process with its metrics, gone with its engine when the context ends."""

    def __init__(self, arguments: Sequence[str], stop: _Stop) -> None:
        self._port = free_port()
        # -P: a folder called worker or engine where the demo is started is not ours.
        self._command = [*die_with_parent(), sys.executable, "-P", "-m", "worker.cli", "start", *arguments]
        self._command += ["--drain-s", "0", "--metrics-port", str(self._port)]
        self._stop = stop

    def __enter__(self) -> "_Worker":
        self._log = tempfile.TemporaryFile()
        self._process = psutil.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends the worker in order
        )
        return self

    def __exit__(self, *_: object) -> None:
        family: list[psutil.Process] = [self._process]
        with suppress(psutil.NoSuchProcess):
            family += self._process.children(recursive=True)
            self._process.terminate()
        alive: list[psutil.Process] = psutil.wait_procs(family, STOP_GRACE_S)[1]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, STOP_GRACE_S)
        self._log.close()

    def pause(self, seconds: float) -> None:
        """Wait a little. `_CancelledError` when a signal came, `EngineUnavailable` when the worker has ended."""
        time.sleep(seconds)
        if self._stop.requested:
            raise _CancelledError
        if self._process.poll() is not None:
            raise EngineUnavailable(self._last_words().removeprefix("worker: "))

    def is_ready(self) -> bool:
        """Whether the worker's own probe says so."""
        return self._get("/readyz") is not None

    def counted(self) -> Counts:
        """What the worker has counted so far; waits until it answers."""
        while (text := self._get("/metrics")) is None:
            self.pause(TICK_S)
        return parse_counts(text)

    def _get(self, path: str) -> str | None:
        try:
            with _OPENER.open(f"http://127.0.0.1:{self._port}{path}", timeout=2) as reply:
                return str(reply.read().decode())
        except OSError:
            return None

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        silent = f"the worker ended with code {self._process.returncode} and said nothing"
        return next((line for line in reversed(lines) if line.strip()), silent)


def _environment() -> dict[str, str]:
    """Ours, without options meant for other workers (a queue, a burst); where models are kept stays."""
    kept = "SLOTMILL_CACHE_DIR"
    return {name: value for name, value in os.environ.items() if name == kept or not name.startswith("SLOTMILL_")}


def parse_counts(text: str) -> Counts:
    """Samples by name, without our prefix, and by the values of their labels joined with a comma (empty without labels)."""
    counts: Counts = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            counts.setdefault(sample.name.removeprefix("slotmill_"), {})[",".join(sample.labels.values())] = sample.value
    return counts


def _enqueue(client: Client, prompts: Sequence[Prompt], max_tokens: int | None) -> list[Answer]:
    answers = []
    for number, prompt in enumerate(prompts, 1):
        limit = min(prompt.max_tokens, max_tokens or prompt.max_tokens)
        answer = Answer(prompt=prompt.text, max_tokens=limit, job_id=f"demo-{number:02}", sent_s=time.monotonic())
        client.enqueue(
            messages=[{"role": "user", "content": prompt.text}],
            id=answer.job_id,
            max_tokens=limit,
            temperature=prompt.temperature,
            top_p=0.9 if prompt.temperature else 1.0,
            seed=number,
        )
        answers.append(answer)
    return answers


def _follow(client: Client, answer: Answer) -> None:
    """Stream one answer into its record; the state is written last, since the main thread takes it for the end."""
    stream = client.stream(answer.job_id)
    state = "failed"
    try:
        for delta in stream:
            if delta.token_ids and answer.first_s is None:
                answer.first_s = time.monotonic()
            answer.text = answer.text[: delta.offset] + delta.text
            answer.num_tokens = delta.index + len(delta.token_ids)
        assert stream.result
        state, answer.error = stream.result.state, stream.result.error or stream.result.code or ""
    except (SlotmillError, redis.RedisError) as error:
        answer.error = str(error)
    finally:
        answer.ended_s = time.monotonic()
        answer.state = state


def _wait_until_ready(worker: _Worker, model: str, console: Console, *, live: bool) -> None:
    started_s = time.monotonic()
    note = f"loading {model} (the first run converts it, about 30 s)"
    if not live:
        console.print(note)
    with console.status(note) if live else nullcontext() as status:
        while not worker.is_ready():
            worker.pause(TICK_S)
            if status:
                status.update(f"{note}: {time.monotonic() - started_s:.0f} s")
    console.print(f"ready after {time.monotonic() - started_s:.1f} s")


def _follow_all(worker: _Worker, client: Client, answers: list[Answer], console: Console, *, live: bool) -> Figures:
    started_s = time.monotonic()
    for answer in answers:
        threading.Thread(target=_follow, args=(client, answer), daemon=True).start()
    seen: list[Counts] = []
    reported: list[str] = []
    cells: list[Answer | None] = [None] * NUM_SLOTS
    with Live(console=console, auto_refresh=False, transient=True) if live else nullcontext() as display:
        while len(reported) < len(answers):
            worker.pause(TICK_S)
            seen.append(worker.counted())
            for answer in answers:
                if answer.state and answer.job_id not in reported:
                    reported.append(answer.job_id)
                    _report(answer, len(reported), len(answers), console, live=live)
            if display:
                view.seat(cells, answers)
                progress = view.progress_line(answers, time.monotonic() - started_s)
                display.update(view.live_view(cells, progress, console), refresh=True)
    return figures_of(answers, seen, worker.counted())


def _report(answer: Answer, num_done: int, num_total: int, console: Console, *, live: bool) -> None:
    if live:
        console.print(view.finished_block(answer, num_done, num_total, console.width))
    else:
        console.print(view.finished_line(answer, num_done, num_total), markup=False, soft_wrap=True)


def figures_of(answers: Sequence[Answer], seen: Sequence[Counts], total: Counts) -> Figures:
    """The run in numbers, from what its worker, a new one, had counted now and then and in the end."""
    allocated = sum(counts["kv_tokens_allocated"][""] for counts in seen)
    filled = sum(counts["kv_tokens_filled"][""] for counts in seen)
    ended_s = [answer.ended_s for answer in answers if answer.ended_s is not None]
    return Figures(
        num_slots=int(total["slots"][""]),
        lengths=tuple(answer.num_tokens for answer in answers),
        num_prompt_tokens=int(total["prompt_tokens_total"][""]),
        elapsed_s=max(ended_s) - min(answer.sent_s for answer in answers),
        slot_steps={state: int(count) for state, count in total["slot_steps_total"].items()},
        kv_blocks=int(total["kv_blocks_capacity"][""]),
        peak_kv_blocks=int(max(counts["kv_blocks"]["used"] for counts in seen)),
        kv_filled_ratio=filled / allocated if allocated else None,
        num_preemptions=int(sum(total["preemptions_total"].values())),
        ttfts_s=tuple(answer.ttft_s for answer in answers if answer.ttft_s is not None),
    )
