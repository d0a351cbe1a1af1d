"""The command line: `worker start`, `enqueue`, `job`, `batch`, `queue`, `dead`, `redis`, `model`, `doctor`, `top`, `demo`.

Relies on `command` for what commands share. Leaves the work to the modules that each command imports when it runs, so that
`worker --help` is quick and no client command loads what the worker needs.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

try:
    import click
    from click.shell_completion import get_completion_class

    from worker import config_file, log
    from worker.batch.command import batch
    from worker.command import Group, is_verbose, option, queue_options, run, say, under
    from worker.doctor.command import doctor
    from worker.engine_options import check_device, engine_options, engine_settings
    from worker.errors import InvalidOption, Problems, ServerUnavailable
    from worker.job_commands import enqueue, job
    from worker.queue_commands import dead_group, queue_group
    from worker.settings import DEFAULT_METRICS_PORT, DEFAULT_MODEL, Settings
    from worker.top.command import top
except KeyboardInterrupt:  # while they load, when there is nobody yet to make a line of it
    sys.exit(3)

EXIT_CODES = "Exit codes: 0 all well, 1 some jobs failed, 2 bad input, 3 cancelled, 4 timeout, 5 no server, 6 no engine."
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

COMPLETION = """\b
In ~/.bashrc:                  eval "$(worker completion bash)"
In ~/.zshrc, after compinit:   eval "$(worker completion zsh)"
In ~/.config/fish/config.fish: worker completion fish | source"""


@click.group(cls=Group, context_settings=HELP, epilog=EXIT_CODES)
@click.version_option(package_name="slotmill", prog_name="worker")
def cli() -> None:
    """Bulk LLM inference: jobs from a Redis stream through a continuous batch, tokens streamed back."""


@cli.command(
    short_help="See it work: a server, a worker, a small model.", examples=["worker demo", "worker demo --cpu --plain"]
)
@option("--model", default=DEFAULT_MODEL, help="Hugging Face id, local directory, GGUF file, or smollm2-135m-instruct.")
@option("--redis-url", default=None, metavar="URL", help="A server to use. Default: one of its own.")
@option("--gpu", type=click.IntRange(min=0), default=None, help="GPU to use. Default: 0 where one is visible.")
@option("--cpu", is_flag=True, default=False, help="Use the CPU.")
@option("--plain", is_flag=True, default=None, help="Lines instead of panels. Default: where the output is no terminal.")
def demo(*, model: str, redis_url: str | None, gpu: int | None, cpu: bool, plain: bool | None) -> None:
    """Start a server and a worker on a small model, ask it a dozen things, show where the slots went; leave nothing behind."""
    from worker import demo as demonstration

    check_device(gpu, cpu=cpu)
    raise click.exceptions.Exit(demonstration.run(model=model, redis_url=redis_url, gpu=gpu, cpu=cpu, plain=plain))


@cli.command(
    short_help="Take jobs and answer them.",
    examples=[
        "worker start --cpu",
        "worker start --model Qwen/Qwen2.5-7B-Instruct --gpu 0,1 --kv-memory 80%",
        "worker start --queue nightly --burst --print-config",
    ],
)
@under(
    "Queue",
    queue_options,
    option("--partitions", type=int, default=1, help="Queues that the queue is split into; producers need the same number."),
    option("--burst", is_flag=True, default=False, help="Leave when the queue is empty and all is done."),
    option("--lease-s", type=float, default=30.0, help="Seconds after which a dead worker's jobs move to others."),
    option("--drain-s", type=float, default=25.0, help="Seconds that a leaving worker goes on with what it has."),
    option("--tenant-weight", multiple=True, metavar="NAME=WEIGHT", help="Share of a tenant; others have 1. Repeatable."),
    option("--isolate-tenants", is_flag=True, help="Tenants find no prefixes of each other in the cache."),
)
@engine_options
@under(
    "Logs and metrics",
    option(
        "--log-format",
        type=click.Choice(["auto", "json", "text"]),
        default="auto",
        help="How the log is written: auto is text on a terminal, JSON lines elsewhere.",
    ),
    option("--log-prompts", is_flag=True, help="Log what jobs ask and are answered, and the messages of errors in the worker."),
    option(
        "--metrics-port", type=int, default=DEFAULT_METRICS_PORT, help="Port of /metrics and the probes; 0 takes a free one."
    ),
    option("--metrics-host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 to be scraped from elsewhere."),
    option(
        "--otlp-endpoint", default=None, metavar="URL", help="Export spans to this OpenTelemetry collector, by OTLP over HTTP."
    ),
)
@click.option("--print-config", is_flag=True, help="Print all options as a file for --config, and leave.")
@click.option("--check", is_flag=True, help="Check the options and leave.")
def start(
    *,
    redis_url: str,
    queue: str,
    partitions: int,
    burst: bool,
    lease_s: float,
    drain_s: float,
    tenant_weight: tuple[str, ...],
    isolate_tenants: bool,
    log_prompts: bool,
    log_format: Literal["auto", "json", "text"],
    otlp_endpoint: str | None,
    metrics_port: int,
    metrics_host: str,
    print_config: bool,
    check: bool,
    **of_engine: Any,
) -> None:
    """Take jobs from a queue and answer them until told to stop.

    SIGTERM or Ctrl-C drains: no new jobs, those at hand go on for --drain-s, the rest is given back. Again leaves at once.
    """
    log.configure(verbose=is_verbose(), prompts=log_prompts, form=log_format)
    log.take_over()
    problems = Problems()
    arguments = engine_settings(of_engine, problems) | {
        "redis_url": redis_url,
        "queue": queue,
        "partitions": partitions,
        "tenant_weights": _weights(tenant_weight, problems),
        "isolate_tenants": isolate_tenants,
        "burst": burst,
        "lease_s": lease_s,
        "drain_s": drain_s,
        "metrics_host": metrics_host,
        "metrics_port": metrics_port,
        "otlp_endpoint": otlp_endpoint or None,
    }
    with problems:
        settings = Settings(**arguments)
    problems.tell()
    if print_config:
        say("\n".join(config_file.written(click.get_current_context())))
    if not print_config and not check:
        from worker import process

        raise click.exceptions.Exit(process.run(settings))


cli.add_command(enqueue)
cli.add_command(job)
cli.add_command(batch)
cli.add_command(queue_group)
cli.add_command(dead_group)


@cli.command(
    "redis", short_help="Run a server in the foreground.", examples=["worker redis", "worker redis --port 6380 --data ./queue"]
)
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


@model.command("path", examples=["worker model path smollm2-135m-instruct"])
@click.argument("name")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def model_path(name: str, *, as_json: bool) -> None:
    """Print the local directory of a model, fetched or converted if need be."""
    from engine.model import resolve

    path = str(resolve(name))
    say(json.dumps({"name": name, "path": path}) if as_json else path)


cli.add_command(doctor)
cli.add_command(top)


@cli.command(short_help="Let a shell complete commands and options.", epilog=COMPLETION, examples=["worker completion bash"])
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands, options and their values."""
    kind = get_completion_class(shell)
    assert kind is not None
    say(kind(cli, {}, "worker", "_WORKER_COMPLETE").source())


def _weights(given: tuple[str, ...], problems: Problems) -> dict[str, float]:
    weights = {}
    for text in given:
        name, _, weight = text.rpartition("=")
        with problems:
            try:
                weights[name] = float(weight)
            except ValueError:
                raise InvalidOption(f"--tenant-weight: {text[:64]}: no number after =; write NAME=2") from None
    return weights


def main() -> None:
    """Entry point of the script `worker`."""
    sys.exit(run(cli))


if __name__ == "__main__":
    main()
