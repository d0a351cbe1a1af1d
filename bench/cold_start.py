"""From the start of a process to its first token, with the model in the cache: the engine alone, and a worker on a queue.

    python -m bench.cold_start [--repeats K] [--option FIELD=VALUE,...] [--json OUT]

The engine is asked as soon as it says that it serves; a worker finds a job that waits. One start beforehand fills the caches of
disk and kernels and is told apart; then both take turns.
"""

import time
from pathlib import Path

import click

from bench.figures import spread
from bench.record import engine_options, json_option, record, save
from bench.service import QUEUE, START_DEADLINE_S, Service, check, worker
from bench.workload import WorkItem
from engine.config import EngineConfig
from engine.messages import EngineFailed, EngineReady, StepReport
from engine.model import resolve
from engine.request import Request, SamplingParams
from worker.bridge import EngineProcess
from worker.client import Client
from worker.embedded import EmbeddedServer
from worker.errors import EngineUnavailable
from worker.settings import ENGINE_COMMAND

ITEM = WorkItem((1, 2, 3, 4, 5, 6, 7, 8), 1)


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--option", "more", default="", metavar="FIELD=VALUE,...", help="fields of EngineConfig")
@click.option("--repeats", type=int, default=5, show_default=True)
@json_option
def main(model: str, more: str, repeats: int, json_path: Path | None) -> None:
    directory, options = str(resolve(model)), engine_options(more)
    first_s = engine_s(EngineConfig(model=directory, **options))
    click.echo(f"engine, once beforehand {first_s:.2f} s")
    seconds: dict[str, list[float]] = {"engine": [], "worker": []}
    for _ in range(repeats):
        seconds["engine"].append(engine_s(EngineConfig(model=directory, **options)))
        seconds["worker"].append(worker_s(directory, more))
    found = {side: spread(taken) for side, taken in seconds.items()}
    for side, taken in found.items():
        click.echo(f"{side:8s} {taken['median']:.2f} s to the first token ({taken['min']:.2f} to {taken['max']:.2f})")
    save(record("cold_start", model=model, options=options, beforehand_s=first_s, first_token_s=found), json_path)


def engine_s(config: EngineConfig) -> float:
    """Seconds from the start of `python -m engine.serve` to a step with a token."""
    started = time.perf_counter()
    engine = EngineProcess(config, ENGINE_COMMAND)
    try:
        while True:
            match engine.receive(START_DEADLINE_S):
                case None | EngineFailed():
                    raise EngineUnavailable("the engine did not get ready")
                case EngineReady():
                    params = SamplingParams(max_tokens=ITEM.output, temperature=0.0)
                    engine.send(Request(request_id="first", prompt_token_ids=ITEM.prompt, params=params))
                case StepReport(events=events) if any(event.token_ids for event in events):
                    return time.perf_counter() - started
    finally:
        engine.stop()


def worker_s(model: str, more: str) -> float:
    """Seconds from the start of `worker start` to the first token of a job that waited."""
    with EmbeddedServer() as server, Client(server.url, QUEUE) as client:
        stream_id = Service(server.url, client).enqueue(ITEM)
        started = time.perf_counter()
        with worker(server.url, model, engine_options(more)) as process:
            for delta in client.stream(stream_id, START_DEADLINE_S, on_silence=lambda _: check(process)):
                if delta.token_ids:
                    return time.perf_counter() - started
    raise EngineUnavailable("the worker made no token")


if __name__ == "__main__":
    main()
