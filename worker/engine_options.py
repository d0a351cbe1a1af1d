"""The options that say how a model is served: device, model, sizes, policies. Of `worker start`, and of what runs an engine.

Relies on `EngineConfig` for what they mean. Leaves what they add up to, and everything about the queue, to `Settings`.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from engine.config import CHOICES, EngineConfig
from worker import log
from worker.command import MEMORY, option, under
from worker.errors import InvalidOption, Problems
from worker.settings import DEFAULT_MODEL, ENGINE_COMMAND, visible_gpus

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    under(
        "Model",
        option("--model", default=DEFAULT_MODEL, help="Hugging Face id, local directory, GGUF file, or smollm2-135m-instruct."),
        option("--served-name", default=None, help="What jobs call the model. Default: the value of --model."),
        option("--max-model-len", type=int, default=None, help="Longest prompt plus output in tokens. Default: the model's."),
        option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            help="Number format of the weights.",
        ),
        option("--kv-dtype", type=click.Choice(CHOICES["kv_dtype"]), default="auto", help="Number format of keys and values."),
        option(
            "--quantisation",
            type=click.Choice(CHOICES["quantisation"]),
            default="none",
            help="Number format of matrix products on a CPU.",
        ),
        option(
            "--kernels",
            type=click.Choice(CHOICES["kernels"]),
            default="auto",
            help="The fastest for the device, or plain torch.",
        ),
        option("--batch-invariant", is_flag=True, default=False, help="The same bits in any batch, more slowly; CPU only."),
    ),
    under(
        "Device",
        option(
            "--gpu", default=None, metavar="N[,N...]", help="GPUs to use, an engine on each. Default: 0 where one is visible."
        ),
        option("--cpu", is_flag=True, default=False, help="Use the CPU."),
        option("--engines", type=click.IntRange(1, 64), default=1, help="Engines that share the CPU's cores."),
        option("--threads", type=int, default=None, help="Compute threads on a CPU. Default: all cores."),
        option("--tensor-parallel", type=int, default=1, help="GPUs (or CPU processes) that share one model."),
        option("--graphs/--no-graphs", default=None, help="Capture steps that only decode as CUDA graphs. Default: on a GPU."),
        option(
            "--run-ahead/--no-run-ahead", default=None, help="Launch a step before the last one is read. Default: on a GPU."
        ),
        option("--stall-s", type=float, default=60.0, help="Seconds without a step after which an engine with work is killed."),
        option("--engine-command", default=None, hidden=True, help="Starts the engine process, for profilers and debuggers."),
    ),
    under(
        "Batch and memory",
        option("--max-slots", type=int, default=None, help="Requests in one step. Default: from the device."),
        option("--token-budget", type=int, default=None, help="Tokens computed in one step. Default: from the device."),
        option("--kv-blocks", type=int, default=None, help="KV cache in blocks. Default: from the memory."),
        option("--kv-memory", type=MEMORY, default=None, help="KV cache: 0.6 or 60% of what is free, 4GiB, or bytes."),
        option("--block-size", type=int, default=16, help="Tokens in one KV block."),
        option(
            "--swap-blocks",
            type=int,
            default=None,
            help="KV blocks in host memory for preempted requests. Default: from the device.",
        ),
        option("--prefix-caching/--no-prefix-caching", default=True, help="Share the KV of equal prompt beginnings."),
    ),
    under(
        "Scheduling",
        option("--scheduling", type=click.Choice(CHOICES["scheduling"]), default="continuous", help="Who shares a step."),
        option(
            "--reservation",
            type=click.Choice(CHOICES["reservation"]),
            default="paged",
            help="KV set aside when a request starts.",
        ),
        option(
            "--preemption",
            type=click.Choice(CHOICES["preemption"]),
            default="auto",
            help="What becomes of a preempted request's KV.",
        ),
        option(
            "--chunked-prefill/--no-chunked-prefill", default=True, help="Split prompts over steps when the budget is short."
        ),
        option("--prefill-first", is_flag=True, default=False, help="Start waiting requests before running ones go on."),
        option("--aging", type=int, default=64, help="Requests of a higher lane that may overtake a waiting one, at most."),
    ),
)


def engine_options(function: F) -> F:
    """Give a command all of them."""
    for add in reversed(_OPTIONS):
        function = add(function)
    return function


def engine_settings(given: Mapping[str, Any], problems: Problems | None = None) -> dict[str, Any]:
    """The arguments of `Settings` that these options decide; `given` is what `engine_options` passed to the command.

    What cannot work is raised, or left in `problems` where those are given, with a stand-in for the engine in the arguments.
    """
    found = problems or Problems()
    sizes = dict(given)
    served_name, stall_s = sizes.pop("served_name"), sizes.pop("stall_s")
    gpu, cpu, num_engines, command = (sizes.pop(name) for name in ("gpu", "cpu", "engines", "engine_command"))
    devices: tuple[str, ...] = ("cpu" if cpu or gpu is None else "cuda:0",)
    with found:
        devices = _devices(gpu, cpu=cpu, num_engines=num_engines, per_engine=sizes["tensor_parallel"])
    engine = EngineConfig(model=sizes["model"])
    with found:
        engine = EngineConfig(device=devices[0], num_threads=sizes.pop("threads"), **sizes)
    if problems is None:
        found.tell()
    return {
        "engine": engine,
        "devices": devices,
        "served_name": served_name,
        "stall_s": stall_s,
        "engine_command": tuple(shlex.split(command)) if command else ENGINE_COMMAND,
    }


def _devices(gpu: str | None, *, cpu: bool, num_engines: int, per_engine: int) -> tuple[str, ...]:
    """The first, or only, device of each engine; without a choice GPU 0 when one is visible, said in the log."""
    check_device(gpu, cpu=cpu)
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


def check_device(gpu: object, *, cpu: bool) -> None:
    if cpu and gpu is not None:
        raise InvalidOption(f"--cpu and --gpu {gpu} exclude each other; give one of them")
