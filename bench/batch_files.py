"""What a batch file costs beside its tokens: lines per second, memory that must not grow with it, the engine's speed beside it.

    python -m bench.batch_files memory [--road local|queue] [--lines N] [--tokens N] [--slots N] [--order ...] [--json OUT]
    python -m bench.batch_files speed [sharegpt|alpaca] [--limit N] [--repeats K] [--json OUT]

memory: runs the command on a file of so many lines with an engine that computes nothing (tests/support/fake_engine.py), samples
memory ten times a second, and checks the files that it leaves with `worker batch verify`. Growth is the greatest in the last
quarter of the run beyond the greatest in the second: in the first, things are loaded.
speed: `worker batch run` on a standard workload as text, in turns with the engine alone on the same tokens; without loading.
"""

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
from tokenizers import Tokenizer

from bench.figures import ratio, spread
from bench.record import json_option, record, save
from bench.sides import OURS, Running
from bench.workload import SHAPES, WorkItem, make_workload
from engine.model import resolve
from tests.support import fake_engine
from worker.connection import connect
from worker.embedded import EmbeddedServer

WORKER = [sys.executable, "-m", "worker.cli"]
PAUSE_S = 0.1


@dataclass(slots=True)
class Road:
    """A command that takes the file and leaves answers, and who else's memory is watched: name -> bytes now."""

    command: list[str]
    watched: dict[str, Callable[[], int]] = field(default_factory=dict)


@contextlib.contextmanager
def local(folder: Path, slots: int, order: str) -> Iterator[Road]:
    """An engine of this machine."""
    engine = shlex.join(fake_engine.command(0.0))
    options = ["--model", str(fake_engine.save_model(folder / "model")), "--cpu", "--max-slots", str(slots)]
    yield Road([*WORKER, "batch", "run", *options, "--order", order, "--ignore-model", "--engine-command", engine])


@contextlib.contextmanager
def queue(folder: Path, slots: int, order: str) -> Iterator[Road]:
    """A server and a worker of its own; what has been collected lives on for a minute."""
    engine = shlex.join(fake_engine.command(0.0))
    model = str(fake_engine.save_model(folder / "model"))
    with EmbeddedServer() as server, connect(server.url) as client:
        where = ["--redis-url", server.url, "--queue", "bench"]
        options = ["--model", model, "--cpu", "--max-slots", str(slots), "--metrics-port", "0", "--engine-command", engine]
        worker = psutil.Popen([*WORKER, "start", *where, *options], stderr=subprocess.DEVNULL)
        try:
            watched = {
                "worker": lambda: int(worker.memory_info().rss),
                "server": lambda: int(client.info("memory")["used_memory"]),
            }
            yield Road([*WORKER, "batch", "submit", *where, "--order", order, "--ignore-model"], watched)
        finally:
            worker.terminate()
            worker.wait()


ROADS = {"local": local, "queue": queue}


@click.group(help=__doc__)
def main() -> None: ...


@main.command(help="Lines per second, and memory over a big file.")
@click.option("--lines", type=int, default=500_000, show_default=True)
@click.option("--road", type=click.Choice(sorted(ROADS)), default="local", show_default=True)
@click.option("--tokens", type=int, default=4, show_default=True, help="tokens of an answer")
@click.option("--slots", type=int, default=64, show_default=True)
@click.option("--order", type=click.Choice(["done", "input"]), default="done", show_default=True)
@json_option
def memory(lines: int, road: str, tokens: int, slots: int, order: str, json_path: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="slotmill-bench-") as name, ROADS[road](Path(name), slots, order) as way:
        source, out = Path(name, "in.jsonl"), Path(name, "out.jsonl")
        write_lines(source, lines, tokens)
        files = ["-i", str(source), "-o", str(out)]
        seconds, samples = sampled(Road([*way.command, *files], way.watched))
        subprocess.run([*WORKER, "batch", "verify", *files], check=True, stdout=subprocess.DEVNULL)
        figures = {who: {"peak_mib": max(seen), "growth_mib": growth(seen)} for who, seen in samples.items()}
        size = source.stat().st_size
    made = record("batch_files", road=road, lines=lines, input_bytes=size, seconds=seconds, memory=figures)
    click.echo(f"{lines:,} lines ({size / 2**20:.0f} MiB) in {seconds:.1f} s: {lines / seconds:,.0f} lines/s")
    for who, of_one in figures.items():
        click.echo(f"{who}: at most {of_one['peak_mib']:.0f} MiB, growth {of_one['growth_mib']:+.1f} MiB")
    save(made, json_path)


@main.command(help="Throughput through a file as a ratio of the engine alone.")
@click.argument("name", type=click.Choice(sorted(SHAPES)), default="alpaca")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--limit", type=int, default=64, show_default=True, help="only the first LIMIT requests")
@click.option("--slots", type=int, default=32, show_default=True)
@click.option("--repeats", type=int, default=3, show_default=True)
@json_option
def speed(name: str, model: str, limit: int, slots: int, repeats: int, json_path: Path | None) -> None:
    directory = str(resolve(model))
    workload, tokenizer = make_workload(name, Path(directory)), Tokenizer.from_file(f"{directory}/tokenizer.json")
    prompts = [(tokenizer.decode(item.prompt), item.output) for item in workload.items[:limit]]
    items = [WorkItem(tuple(tokenizer.encode(text, add_special_tokens=False).ids), output) for text, output in prompts]
    num_output = sum(item.output for item in items)
    runs: dict[str, list[float]] = {"file": [], "engine": []}
    alone_options = {"model": directory, "max_model_len": 2048, "prefix_caching": False, "max_slots": slots}
    with Running(OURS, alone_options) as alone, tempfile.TemporaryDirectory(prefix="slotmill-bench-") as folder:
        for turn in range(repeats):
            for side, made in runs.items():
                seconds = (
                    alone.generate(items)[0] if side == "engine" else through_a_file(Path(folder), prompts, directory, slots)
                )
                made.append(num_output / seconds)
                click.echo(f"turn {turn + 1}/{repeats}: {side} {made[-1]:.1f} tokens/s", err=True)
    found = ratio(runs["file"], runs["engine"])
    click.echo(f"through a file / engine alone: {found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})")
    about = {"name": name, "digest": workload.digest, "requests": len(items)}
    figures = {side: spread(made) for side, made in runs.items()}
    save(record("batch_speed", workload=about, slots=slots, ratio=found, tokens_per_s=figures, runs=runs), json_path)


def through_a_file(folder: Path, prompts: list[tuple[str, int]], model: str, slots: int) -> float:
    """Seconds of a run, from the engine that is ready to the last line."""
    for old in folder.iterdir():
        old.unlink()
    with (folder / "in.jsonl").open("w") as file:
        for number, (text, output) in enumerate(prompts):
            body = {"prompt": text, "max_tokens": output, "temperature": 0, "ignore_eos": True}
            file.write(json.dumps(_line(number, body)) + "\n")
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    options = ["--model", model, "--cpu", "--max-slots", str(slots), "--max-model-len", "2048", "--no-prefix-caching", "--json"]
    told = subprocess.run([*WORKER, "batch", "run", *files, *options], check=True, capture_output=True).stdout
    summary = json.loads(told)
    assert summary["generated_tokens"] == sum(output for _, output in prompts)
    return float(summary["seconds"])


def write_lines(path: Path, lines: int, tokens: int) -> None:
    """Completions of two words each, all different in id."""
    with path.open("w") as file:
        for number in range(lines):
            body = {"model": "m", "prompt": f"w{20 + number % 40} w{20 + number // 40 % 40}", "max_tokens": tokens}
            file.write(json.dumps(_line(number, body)) + "\n")


def _line(number: int, body: dict[str, object]) -> dict[str, object]:
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def sampled(road: Road) -> tuple[float, dict[str, list[float]]]:
    """Run it; seconds, and MiB of the command, of its engine and of who else is watched, over time."""
    started = time.monotonic()
    samples: dict[str, list[float]] = {}
    with subprocess.Popen(road.command, stderr=sys.stderr) as process:
        command = psutil.Process(process.pid)
        watched = {"command": lambda: int(command.memory_info().rss)} | road.watched
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for who, look in watched.items():
                    samples.setdefault(who, []).append(look() / 2**20)
            time.sleep(PAUSE_S)
    if process.returncode:
        raise click.ClickException(f"{shlex.join(road.command[2:])} ended with code {process.returncode}")
    return time.monotonic() - started, samples


def growth(samples: list[float]) -> float:
    """Of the greatest value, from the second quarter to the last."""
    quarter = max(1, len(samples) // 4)
    return max(samples[-quarter:]) - max(samples[quarter : 2 * quarter] or samples)


if __name__ == "__main__":
    main()
