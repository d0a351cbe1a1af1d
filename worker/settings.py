"""What the operator asked of one worker, read once from the command line and the environment, and frozen.

Relies on `EngineConfig` for everything that the engine process is told. Leaves parsing to `cli` and every connection to those
who open it. `Settings` refuses values that cannot work, so that nothing behind it has to ask again.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from engine.config import EngineConfig, usable_cores
from worker.connection import DEFAULT_REDIS_URL, connect
from worker.errors import InvalidOption
from worker.keys import DEFAULT_QUEUE, Keys, names_of

ENGINE_COMMAND = (sys.executable, "-P", "-m", "engine.serve")
"""Starts the engine process; `--fd N` is added to it."""

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_METRICS_PORT = 9400
DEVICES = Path("/dev")


def default_worker_id() -> str:
    """Host and process id: distinct among the living, and the same again in a container that is restarted."""
    return f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of one worker process. Seconds end in `_s`."""

    engine: EngineConfig
    """What every engine is told; its device where `devices` is empty."""
    devices: tuple[str, ...] = ()
    """Devices of the engines behind this worker, one each."""
    redis_url: str = DEFAULT_REDIS_URL
    queue: str = DEFAULT_QUEUE
    partitions: int = 1
    """Queues that the queue is split into, for one that outgrows a server; producers must be told the same number."""
    served_name: str | None = None
    """The name a job's `model` must equal when it gives one. Default: the engine's `model`."""
    worker_id: str = field(default_factory=default_worker_id)
    """Name of the consumer and of `worker:<id>`."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of the engine by tenant; who is not named has 1."""
    isolate_tenants: bool = False
    """No tenant finds another's prefixes in the cache, nor can it tell from the time of an answer what they hold."""
    burst: bool = False
    """Leave when the queue is empty and nothing is in flight."""
    lease_s: float = 30.0
    """How long a job stays ours without a renewal. Shorter moves a dead worker's jobs sooner; too short loses leases."""
    stall_s: float = 60.0
    """An engine that has work and makes no step for this long is killed and started again. More where one step of a long prompt
    takes that long."""
    drain_s: float = 25.0
    """How long a leaving worker goes on with what it has. Keep it below the grace period of the init system."""
    metrics_host: str = "127.0.0.1"
    """`0.0.0.0` where a Prometheus on another machine, or outside the container, scrapes."""
    metrics_port: int = DEFAULT_METRICS_PORT
    """0 takes a free port, which is logged."""
    otlp_endpoint: str | None = None
    """Where spans go; None: none are made."""
    engine_command: tuple[str, ...] = ENGINE_COMMAND
    """What starts the engine; for a profiler or debugger in front of it, and for tests."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise InvalidOption(*problems)

    def _problems(self) -> Iterator[str]:
        if not 0.5 <= self.lease_s <= 3600:
            yield f"--lease-s: {self.lease_s:g} is outside 0.5..3600 seconds; use 30"
        if not 0 <= self.drain_s <= 3600:
            yield f"--drain-s: {self.drain_s:g} is outside 0..3600 seconds; use 25"
        if not 1 <= self.stall_s <= 86400:
            yield f"--stall-s: {self.stall_s:g} is outside 1..86400 seconds; use 60"
        if not 0 <= self.metrics_port <= 65535:
            yield f"--metrics-port: {self.metrics_port} is outside 0..65535; use 9400, or 0 for a free one"
        for name, weight in self.tenant_weights.items():
            if not 1 <= len(name) <= 128 or not 0.001 <= weight <= 1000:
                limits = "not a name of 1 to 128 characters with a weight of 0.001 to 1000"
                yield f"--tenant-weight: {name[:64]}={weight:g} is {limits}; write acme=2"
        if not self.engine.model:
            yield f"--model: is empty; name one, such as {DEFAULT_MODEL}"
        try:
            connect(self.redis_url, self.queue)  # opens nothing
        except InvalidOption as error:
            yield from error.problems
        try:
            for name in self.queues:
                Keys(name)  # refuses a name that cannot stand in a key
        except InvalidOption as error:
            yield from error.problems

    @cached_property
    def engines(self) -> tuple[EngineConfig, ...]:
        """The configuration of each engine. Those on a CPU share its cores, unless the threads of each are given."""
        devices = self.devices or (self.engine.device,)
        on_cpu = devices.count("cpu") * self.engine.tensor_parallel
        threads = self.engine.num_threads
        if threads is None and on_cpu > 1:
            threads = max(1, usable_cores() // on_cpu)
        return tuple(replace(self.engine, device=device, num_threads=threads) for device in devices)

    @cached_property
    def queues(self) -> list[str]:
        """The queue, or its partitions."""
        return names_of(self.queue, self.partitions)

    @property
    def device_names(self) -> str:
        """The devices, for people."""
        return ",".join(engine.device for engine in self.engines)

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_name or self.engine.model

    @property
    def renew_s(self) -> float:
        """Seconds between renewals: three may fail before a lease is lost."""
        return self.lease_s / 4

    @property
    def reclaim_s(self) -> float:
        """Seconds between looks for jobs of dead workers."""
        return min(10.0, self.lease_s / 3)


def visible_gpus() -> int:
    """How many NVIDIA GPUs this process may use, without asking CUDA (which would need torch).

    `CUDA_VISIBLE_DEVICES` decides when set; else the driver's device files, which containers are given or not.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    files = len([path for path in DEVICES.glob("nvidia*") if path.name[6:].isdigit()])
    if chosen is None or not files:
        return files
    return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
