"""The command line: `worker start`, `enqueue`, `job`, `queue`, `dead`, `redis`, `model`, `doctor`, `top`, `demo`.

Relies on `command` for what commands share. Leaves the work to the modules that each command imports when it runs, so that
`worker --help` is quick and no client command loads what the worker needs.
"""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Literal

import click

from engine.config import CHOICES, EngineConfig
from worker import log
from worker.command import Group, is_verbose, option, queue_options, run, say
from worker.doctor.command import doctor
from worker.errors import InvalidOption, ServerUnavailable
from worker.job_commands import enqueue, job
from worker.queue_commands import dead_group, queue_group
from worker.settings import DEFAULT_METRICS_PORT, DEFAULT_MODEL, ENGINE_COMMAND, Settings, visible_gpus
from worker.top.command import top

EXIT_CODES = "Exit codes: 0 all well, 1 some jobs failed, 2 bad input, 3 cancelled, 4 timeout, 5 no server, 6 no engine."
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=Group, context_settings=HELP, epilog=EXIT_CODES)
@click.version_option(package_name="slotmill", prog_name="worker")
def cli() -> None:
    """Bulk LLM inference: jobs from a Redis stream through a continuous batch, tokens streamed back."""


@cli.command(short_help="See it work: a server, a worker, a small model.")
@option("--model", default=DEFAULT_MODEL, help="Hugging Face id, local directory, GGUF file, or smollm2-135m-instruct.")
@option("--redis-url", default=None, metavar="URL", help="A server to use. Default: one of its own.")
@option("--gpu", type=click.IntRange(min=0), default=None, help="GPU to use. Default: 0 where one is visible.")
@option("--cpu", is_flag=True, default=False, help="Use the CPU.")
@option("--plain", is_flag=True, default=None, help="Lines instead of panels. Default: where the output is no terminal.")
def demo(*, model: str, redis_url: str | None, gpu: int | None, cpu: bool, plain: bool | None) -> None:
    """Start a server and a worker on a small model, ask it a dozen things, show where the slots went; leave nothing behind."""
    from worker import demo as demonstration

    _check_device(gpu, cpu=cpu)
    raise click.exceptions.Exit(demonstration.run(model=model, redis_url=redis_url, gpu=gpu, cpu=cpu, plain=plain))


@cli.command(short_help="Take jobs and answer them.")
@option("--model", default=DEFAULT_MODEL, help="Hugging Face id, local directory, GGUF file, or smollm2-135m-instruct.")
@option("--served-name", default=None, help="What jobs call the model. Default: the value of --model.")
@queue_options
@option("--partitions", type=int, default=1, help="Queues that the queue is split into; producers need the same number.")
@option("--gpu", default=None, metavar="N[,N...]", help="GPUs to use, an engine on each. Default: 0 where one is visible.")
@option("--cpu", is_flag=True, default=False, help="Use the CPU.")
@option("--engines", type=click.IntRange(1, 64), default=1, help="Engines that share the CPU's cores.")
@option("--burst", is_flag=True, default=False, help="Leave when the queue is empty and all is done.")
@option("--max-slots", type=int, default=None, help="Requests in one step. Default: from the device.")
@option("--token-budget", type=int, default=None, help="Tokens computed in one step. Default: from the device.")
@option("--kv-blocks", type=int, default=None, help="KV cache in blocks. Default: from the memory.")
@option("--kv-memory", type=float, default=None, help="KV cache as a fraction of free memory (up to 1) or in bytes.")
@option("--block-size", type=int, default=16, help="Tokens in one KV block.")
@option("--max-model-len", type=int, default=None, help="Longest prompt plus output in tokens. Default: the model's.")
@option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="Number format of the weights.",
)
@option("--kv-dtype", type=click.Choice(CHOICES["kv_dtype"]), default="auto", help="Number format of keys and values.")
@option("--kernels", type=click.Choice(CHOICES["kernels"]), default="auto", help="The fastest for the device, or plain torch.")
@option(
    "--quantisation",
    type=click.Choice(CHOICES["quantisation"]),
    default="none",
    help="Number format of matrix products on a CPU.",
)
@option(
    "--swap-blocks", type=int, default=None, help="KV blocks in host memory for preempted requests. Default: from the device."
)
@option(
    "--preemption", type=click.Choice(CHOICES["preemption"]), default="auto", help="What becomes of a preempted request's KV."
)
@option("--prefix-caching/--no-prefix-caching", default=True, help="Share the KV of equal prompt beginnings.")
@option("--chunked-prefill/--no-chunked-prefill", default=True, help="Split prompts over steps when the budget is short.")
@option("--prefill-first", is_flag=True, default=False, help="Start waiting requests before running ones go on.")
@option("--scheduling", type=click.Choice(CHOICES["scheduling"]), default="continuous", help="Who shares a step.")
@option("--reservation", type=click.Choice(CHOICES["reservation"]), default="paged", help="KV set aside when a request starts.")
@option("--aging", type=int, default=64, help="Requests of a higher lane that may overtake a waiting one, at most.")
@option("--run-ahead/--no-run-ahead", default=None, help="Launch a step before the last one is read. Default: on a GPU.")
@option("--graphs/--no-graphs", default=None, help="Capture steps that only decode as CUDA graphs. Default: on a GPU.")
@option("--batch-invariant", is_flag=True, default=False, help="The same bits in any batch, more slowly; CPU only.")
@option("--threads", type=int, default=None, help="Compute threads on a CPU. Default: all cores.")
@option("--tensor-parallel", type=int, default=1, help="GPUs (or CPU processes) that share one model.")
@option("--lease-s", type=float, default=30.0, help="Seconds after which a dead worker's jobs move to others.")
@option("--stall-s", type=float, default=60.0, help="Seconds without a step after which an engine with work is killed.")
@option("--drain-s", type=float, default=25.0, help="Seconds that a leaving worker goes on with what it has.")
@click.option("--tenant-weight", multiple=True, metavar="NAME=WEIGHT", help="Share of a tenant; others have 1. Repeatable.")
@option("--isolate-tenants", is_flag=True, help="Tenants find no prefixes of each other in the cache.")
@option("--log-prompts", is_flag=True, help="Log what jobs ask and are answered, and the messages of errors in the worker.")
@option(
    "--log-format",
    type=click.Choice(["auto", "json", "text"]),
    default="auto",
    help="How the log is written: auto is text on a terminal, JSON lines elsewhere.",
)
@option("--otlp-endpoint", default=None, metavar="URL", help="Export spans to this OpenTelemetry collector, by OTLP over HTTP.")
@option("--metrics-port", type=int, default=DEFAULT_METRICS_PORT, help="Port of /metrics and the probes; 0 takes a free one.")
@option("--metrics-host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 to be scraped from elsewhere.")
@option("--engine-command", default=None, hidden=True, help="Starts the engine process, for profilers and debuggers.")
def start(
    *,
    redis_url: str,
    queue: str,
    partitions: int,
    model: str,
    served_name: str | None,
    gpu: str | None,
    cpu: bool,
    engines: int,
    burst: bool,
    lease_s: float,
    stall_s: float,
    drain_s: float,
    tenant_weight: tuple[str, ...],
    isolate_tenants: bool,
    log_prompts: bool,
    log_format: Literal["auto", "json", "text"],
    otlp_endpoint: str | None,
    metrics_port: int,
    metrics_host: str,
    engine_command: str | None,
    threads: int | None,
    tensor_parallel: int,
    **sizes: object,
) -> None:
    """Take jobs from a queue and answer them until told to stop.

    SIGTERM or Ctrl-C drains: no new jobs, those at hand go on for --drain-s, the rest is given back. Again leaves at once.
    """
    from worker import process

    log.configure(verbose=is_verbose(), prompts=log_prompts, form=log_format)
    log.take_over()
    devices = _devices(gpu, cpu=cpu, num_engines=engines, per_engine=tensor_parallel)
    shared = {"model": model, "device": devices[0], "num_threads": threads, "tensor_parallel": tensor_parallel}
    settings = Settings(
        engine=EngineConfig(**shared, **sizes),  # type: ignore[arg-type]
        devices=devices,
        redis_url=redis_url,
        queue=queue,
        partitions=partitions,
        served_name=served_name,
        tenant_weights=_weights(tenant_weight),
        isolate_tenants=isolate_tenants,
        burst=burst,
        lease_s=lease_s,
        stall_s=stall_s,
        drain_s=drain_s,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        otlp_endpoint=otlp_endpoint or None,
        engine_command=tuple(shlex.split(engine_command)) if engine_command else ENGINE_COMMAND,
    )
    raise click.exceptions.Exit(process.run(settings))


cli.add_command(enqueue)
cli.add_command(job)
cli.add_command(queue_group)
cli.add_command(dead_group)


@cli.command("redis", short_help="Run a server in the foreground.")
@option("--port", type=click.IntRange(0, 65535), default=6379, help="Port on 127.0.0.1; 0 takes a free one.")
@option("--data", type=click.Path(file_okay=False, path_type=Path), help="Directory to keep. Default: a temporary one.")
def redis_server(port: int, data: Path | None) -> None:
    """Run a server in the foreground, print its URL, and stop it at Ctrl-C."""
    from worker.embedded import EmbeddedServer

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with EmbeddedServer(data, port or None) as server:
            say(server.url)
            while (end := os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
                time.sleep(0.5)
    except KeyboardInterrupt:
        return
    if end.si_code != os.CLD_EXITED:
        raise ServerUnavailable(f"server: killed by signal {end.si_status}; started with --data it goes on from there")
    raise ServerUnavailable("server: it ended by itself; its data directory may be full or in use")


@cli.group(cls=Group)
def model() -> None:
    """Model files."""


@model.command("path")
@click.argument("name")
def model_path(name: str) -> None:
    """Print the local directory of a model, fetched or converted if need be."""
    from engine.model import resolve

    say(str(resolve(name)))


cli.add_command(doctor)
cli.add_command(top)


def _devices(gpu: str | None, *, cpu: bool, num_engines: int, per_engine: int) -> tuple[str, ...]:
    """The first, or only, device of each engine; without a choice GPU 0 when one is visible, said in the log."""
    _check_device(gpu, cpu=cpu)
    is_chosen = cpu or gpu is not None
    if not is_chosen and visible_gpus():
        gpu = ",".join(map(str, range(per_engine)))
    devices = ("cpu",) * num_engines if gpu is None else _gpus(gpu, per_engine)
    if gpu is not None and num_engines > 1:
        raise InvalidOption(
            f"--engines: {num_engines}: on GPUs there is one for each that --gpu names; leave it out or give --cpu"
        )
    if not is_chosen:
        log.get("cli").info("device_chosen", device=",".join(devices), choose_with="--cpu or --gpu N")
    return devices


def _weights(given: tuple[str, ...]) -> dict[str, float]:
    pairs = [text.rpartition("=") for text in given]
    try:
        return {name: float(weight) for name, _, weight in pairs}
    except ValueError:
        raise InvalidOption(f"--tenant-weight: {' '.join(given)[:64]}: no number after =; write NAME=2") from None


def _gpus(names: str, per_engine: int) -> tuple[str, ...]:
    """`0,1,2,3` as one device for each engine; its other GPUs follow that one."""
    if not re.fullmatch(r"\d{1,3}(,\d{1,3})*", names) or len(set(names.split(","))) <= names.count(","):
        raise InvalidOption(f"--gpu: {names} is not a list of different GPUs; give numbers from 0 on, as in 0,1")
    numbers = [int(name) for name in names.split(",")]
    groups = [numbers[start : start + per_engine] for start in range(0, len(numbers), per_engine)]
    if any(group != list(range(group[0], group[0] + per_engine)) for group in groups):
        example = ",".join(map(str, range(per_engine)))
        needed = f"--tensor-parallel {per_engine} needs {per_engine} GPUs in a row for each engine"
        raise InvalidOption(f"--gpu: {names}: {needed}; give them all, as in {example}")
    return tuple(f"cuda:{group[0]}" for group in groups)


def _check_device(gpu: object, *, cpu: bool) -> None:
    if cpu and gpu is not None:
        raise InvalidOption(f"--cpu and --gpu {gpu} exclude each other; give one of them")


def main() -> None:
    """Entry point of the script `worker`."""
    sys.exit(run(cli))


if __name__ == "__main__":
    main()
