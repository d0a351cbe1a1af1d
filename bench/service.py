"""The engine through the queue: what the way there costs, and what it gives at a rate.

    python -m bench.service closed [sharegpt|alpaca] [--limit N] [--repeats K] [--json OUT]
    python -m bench.service open [sharegpt|alpaca] [--rates 0.5,1,2] [--requests N] [--seed S] [--json OUT]

closed: the whole workload is enqueued at once, and timed from the first enqueue to the last result; in turns with the engine
alone on the same requests. open: requests arrive as a Poisson process. Time to first token is counted from when a request was
to arrive, time between tokens from frame to frame as a subscriber hears them. Without rates they double from a low one until
the waits grow (`is_growing` of bench/figures.py), and halve the last gap twice.

A server and a worker are started for it; the worker's prefix cache is off, or a repeated run would find its prompts.
"""

import contextlib
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import click

from bench.figures import arrivals, is_growing, percentiles, ratio, spread
from bench.meter import Meter
from bench.record import engine_options, json_option, record, save
from bench.sides import OURS, Running
from bench.workload import SHAPES, WorkItem, make_workload
from engine.model import resolve
from worker.client import Client
from worker.connection import connect
from worker.embedded import EmbeddedServer, die_with_parent
from worker.errors import EngineUnavailable
from worker.frames import TokenFrame, decode_frame
from worker.keys import Keys

QUEUE = "bench"
START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 30.0
LOOK_S = 0.02
"""How often the end of a job is looked for: rarely enough to take nothing from the engine's cores."""
FLAGS = {"num_threads": "threads"}
"""Fields of `EngineConfig` that `worker start` calls otherwise."""
FIRST_RATE = 0.25
REFINEMENTS = 2


@click.group(help=__doc__)
def main() -> None: ...


workload_arguments = (
    click.argument("name", type=click.Choice(sorted(SHAPES)), default="sharegpt"),
    click.option("--model", default="smollm2-135m-instruct", show_default=True),
    click.option("--option", "more", default="max_slots=64", show_default=True, help="fields of EngineConfig"),
    json_option,
)


def _with_workload(command: Any) -> Any:
    for argument in reversed(workload_arguments):
        command = argument(command)
    return command


@main.command(help="Throughput through the queue as a ratio of the engine alone.")
@_with_workload
@click.option("--limit", type=int, help="only the first LIMIT requests")
@click.option("--repeats", type=int, default=3, show_default=True)
def closed(name: str, model: str, more: str, json_path: Path | None, limit: int | None, repeats: int) -> None:
    directory, options = str(resolve(model)), engine_options(more)
    workload = make_workload(name, Path(directory))
    items = workload.items[:limit]
    num_output = sum(item.output for item in items)
    speeds: dict[str, list[float]] = {"service": [], "engine": []}
    cores: dict[str, list[dict[str, float]]] = {"service": [], "engine": []}
    alone_options = {"model": directory, "max_model_len": 2048, "prefix_caching": False} | options
    with Running(OURS, alone_options) as alone, running_service(directory, options) as service:
        for turn in range(repeats):
            for side, made in speeds.items():
                with Meter() as meter:
                    wall_s = alone.generate(items)[0] if side == "engine" else service.all_at_once(items)
                made.append(num_output / wall_s)
                cores[side].append(meter.cores)
                click.echo(f"turn {turn + 1}/{repeats}: {side} {made[-1]:.1f} tokens/s", err=True)
    found = ratio(speeds["service"], speeds["engine"])
    click.echo(f"through the queue / engine alone: {found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})")
    about = {"name": name, "digest": workload.digest, "requests": len(items)}
    figures = {side: spread(made) for side, made in speeds.items()}
    save(
        record("closed", workload=about, options=options, ratio=found, tokens_per_s=figures, runs=speeds, cores=cores),
        json_path,
    )


@main.command("open", help="Latencies and throughput at rates of arrival.")
@_with_workload
@click.option("--rates", help="requests a second; without any, rates are searched until the waits grow")
@click.option("--requests", "count", type=int, default=256, show_default=True, help="at each rate; several times the slots")
@click.option("--cap", type=int, help="cut outputs to CAP tokens")
@click.option("--seed", type=int, default=0, show_default=True)
def open_(
    name: str, model: str, more: str, json_path: Path | None, rates: str | None, count: int, cap: int | None, seed: int
) -> None:
    directory, options = str(resolve(model)), engine_options(more)
    workload = make_workload(name, Path(directory))
    items = [workload.items[place % len(workload.items)] for place in range(count)]
    items = [WorkItem(item.prompt, min(item.output, cap or item.output)) for item in items]
    rows: list[dict[str, Any]] = []
    with running_service(directory, options) as service:

        def measure(rate: float) -> bool:
            rows.append({"rate": rate, **service.at_rate(items, rate, seed)})
            show(rows[-1])
            return bool(rows[-1]["is_saturated"])

        if rates:
            for rate in rates.split(","):
                measure(float(rate))
        else:
            search(measure, most=count)
    rows.sort(key=lambda row: row["rate"])
    highest = max((row["rate"] for row in rows if not row["is_saturated"]), default=None)
    about = {"name": name, "digest": workload.digest, "requests": count, "cap": cap, "seed": seed}
    save(record("open", workload=about, options=options, rates=rows, highest_rate=highest), json_path)


def search(is_saturated: Callable[[float], bool], most: float) -> None:
    """Rates that double until the waits grow, or pass `most`; then the last gap is halved."""
    low, high = 0.0, FIRST_RATE
    while not is_saturated(high):
        low, high = high, 2 * high
        if high > most:
            return
    for _ in range(REFINEMENTS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_saturated(middle) else (middle, high)


def show(row: dict[str, Any]) -> None:
    """A line for people."""
    ttft, itl = row["ttft_s"], row["itl_s"]
    note = "  the waits grow" if row["is_saturated"] else ""
    click.echo(
        f"{row['rate']:6.2f} requests/s  {row['output_tokens_per_s']:7.1f} tokens/s  first token p50 {ttft['p50']:.2f} p90 "
        f"{ttft['p90']:.2f} p99 {ttft['p99']:.2f} s  between p50 {1e3 * itl['p50']:.0f} p99 {1e3 * itl['p99']:.0f} ms{note}"
    )


@contextlib.contextmanager
def running_service(model: str, options: dict[str, Any]) -> Iterator["Service"]:
    """A server, a worker that has answered a job, and a client; gone afterwards."""
    with EmbeddedServer() as server, worker(server.url, model, options) as process, Client(server.url, QUEUE) as client:
        service = Service(server.url, client)
        client.result(service.enqueue(WorkItem((1, 2, 3), 8)), START_DEADLINE_S, on_silence=lambda _: check(process))
        yield service


@contextlib.contextmanager
def worker(url: str, model: str, options: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """A worker on the CPU, ended with its engine afterwards. `options` are fields of `EngineConfig`."""
    flags = {FLAGS.get(name, name).replace("_", "-"): value for name, value in options.items()}
    words = [f"--{flag}" + ("" if value is True else f"={value}") for flag, value in flags.items()]
    command = [*die_with_parent(), sys.executable, "-m", "worker.cli", "start", "--cpu", "--queue", QUEUE, "--redis-url", url]
    command += ["--model", model, "--no-prefix-caching", "--metrics-port", "0", "--drain-s", "0", *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check(process: subprocess.Popen[bytes]) -> None:
    """Raise `EngineUnavailable` when the worker has ended."""
    if process.poll() is not None:
        raise EngineUnavailable(f"the worker ended with code {process.returncode}")


@dataclass(slots=True)
class Heard:
    """What a subscriber heard of one job: when each frame came, and how many tokens it had."""

    at: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)


class Service:
    """A queue with a worker, and what is measured through it."""

    def __init__(self, url: str, client: Client) -> None:
        self._client, self._raw, self._keys = client, connect(url, QUEUE), Keys(QUEUE)

    def enqueue(self, item: WorkItem) -> str:
        """Put a greedy request of exact length in; its id."""
        job_id = uuid.uuid4().hex
        body = {"prompt_token_ids": list(item.prompt), "max_tokens": item.output, "temperature": 0, "ignore_eos": True}
        return self._client.enqueue(id=job_id, **body)  # type: ignore[arg-type]

    def all_at_once(self, items: Sequence[WorkItem]) -> float:
        """Seconds from the first enqueue to the last result."""
        started = time.perf_counter()
        self._wait([self.enqueue(item) for item in items])
        return time.perf_counter() - started

    def at_rate(self, items: Sequence[WorkItem], rate: float, seed: int) -> dict[str, Any]:
        """Figures of requests that arrive at `rate` a second."""
        due = arrivals(rate, len(items), seed)
        with Meter() as meter, self._listening() as messages:
            started = time.perf_counter()
            job_ids = []
            for item, at in zip(items, due, strict=True):
                time.sleep(max(0.0, started + at - time.perf_counter()))
                job_ids.append(self.enqueue(item))
            self._wait(job_ids)
            wall_s = time.perf_counter() - started
        heard = frames(messages)
        firsts = [heard[job].at[0] - started - at for job, at in zip(job_ids, due, strict=True)]
        gaps = [later - earlier for job in job_ids for earlier, later in zip(heard[job].at, heard[job].at[1:], strict=False)]
        num_tokens = sum(sum(heard[job].num_tokens) for job in job_ids)
        assert num_tokens == sum(item.output for item in items), "a frame was not heard, or a length is not what was asked"
        return {
            "wall_s": wall_s,
            "output_tokens_per_s": num_tokens / wall_s,
            "ttft_s": percentiles(firsts),
            "itl_s": percentiles(gaps),
            "tokens_per_frame": num_tokens / sum(len(heard[job].at) for job in job_ids),
            "is_saturated": is_growing(firsts),
            "cores": meter.cores,
        }

    def _wait(self, job_ids: Sequence[str]) -> None:
        """Until each has a result that succeeded."""
        left = list(job_ids)
        while left:
            if self._raw.exists(self._keys.result(left[-1])):
                result = self._client.result(left.pop())
                assert result.state == "succeeded", result.error
            else:
                time.sleep(LOOK_S)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[list[tuple[float, str, bytes]]]:
        """What all channels carry, with the time it came, without a look at it: the thread takes little from the engine."""
        messages: list[tuple[float, str, bytes]] = []
        prefix, is_over, subscribed = self._keys.channel(""), Event(), Event()

        def listen() -> None:
            with self._raw.pubsub() as subscription:
                subscription.psubscribe(f"{prefix}*")
                while not is_over.is_set():
                    message = subscription.get_message(timeout=0.1)
                    if message and message["type"] == "pmessage":
                        messages.append(
                            (time.perf_counter(), message["channel"].decode().removeprefix(prefix), message["data"])
                        )
                    elif message:
                        subscribed.set()

        thread = Thread(target=listen)
        thread.start()
        assert subscribed.wait(10)
        try:
            yield messages
        finally:
            is_over.set()
            thread.join()


def frames(messages: Sequence[tuple[float, str, bytes]]) -> dict[str, Heard]:
    """By job, the frames that carry tokens."""
    heard: dict[str, Heard] = {}
    for at, job_id, data in messages:
        frame = decode_frame(data)
        if isinstance(frame, TokenFrame) and frame.token_ids:
            one = heard.setdefault(job_id, Heard())
            one.at.append(at)
            one.num_tokens.append(len(frame.token_ids))
    return heard


if __name__ == "__main__":
    main()
