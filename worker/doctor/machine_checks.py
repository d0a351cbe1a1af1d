"""What a worker needs of the machine that it runs on, as checks of `worker doctor`.

Relies on kernels/selfcheck.py, a program of its own, for everything that has to load torch; nothing is fetched, converted or
written here.
"""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil
from packaging.requirements import Requirement

from engine.errors import ConfigError
from worker.doctor.findings import GIB, Finding, Unknown, fail, ok, size, warn
from worker.settings import visible_gpus

SELFCHECK: Final = (sys.executable, "-P", "-m", "kernels.selfcheck")
SELFCHECK_S: Final = 300.0
"""Loading torch takes seconds, on a busy machine many; compiling a kernel as well."""
MIN_PYTHON: Final = (3, 11)
LOW_DISK_BYTES: Final = 2 * GIB
LOW_MEMORY_BYTES: Final = 2 * GIB
"""What a small model needs, once converted and once loaded."""
FEW_FILES: Final = 1024
DRIVER: Final = Path("/proc/driver/nvidia/version")
_TORCH: Final = "pip install --force-reinstall torch, in a build for this machine (https://pytorch.org/get-started)"


class Selfcheck:
    """kernels/selfcheck.py in a process of its own, which goes on while others ask the server."""

    def __init__(self, command: tuple[str, ...] = SELFCHECK) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def report(self) -> Mapping[str, Any] | str:
        """What it printed, or why it did not."""
        try:
            printed, said = self._process.communicate(timeout=SELFCHECK_S)
            found: Mapping[str, Any] = json.loads(printed)
        except subprocess.TimeoutExpired:
            self.close()
            return f"did not end in {SELFCHECK_S:.0f} s"
        except ValueError:
            return next(iter(reversed(said.splitlines())), f"ended with {self._process.returncode}")[:200]
        return found


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What this machine has."""

    python: tuple[int, int, int]
    packages: Mapping[str, tuple[Requirement, str | None]] | None
    """Of each dependency what is asked for, and the version that is installed; None where nothing says."""
    num_gpus: int
    driver: str | None
    torch: Mapping[str, Any] | str | None
    """What kernels/selfcheck.py printed, or why it did not; None when it was not asked."""
    model: str
    found_model: Path | ConfigError | None
    cache: Path
    is_cache_writable: bool
    free_disk_bytes: int
    free_memory_bytes: int
    port: int
    port_error: str | None
    max_files: int


def gather(model: str, port: int, torch: Mapping[str, Any] | str | None) -> MachineFacts:
    """Look around."""
    from engine.model_cache import cache_dir

    cache = cache_dir()
    there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MachineFacts(
        python=sys.version_info[:3],
        packages=_packages(),
        num_gpus=visible_gpus(),
        driver=_driver(),
        torch=torch,
        model=model,
        found_model=_located(model),
        cache=cache,
        is_cache_writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        free_disk_bytes=shutil.disk_usage(there).free,
        free_memory_bytes=psutil.virtual_memory().available,
        port=port,
        port_error=_port_error(port),
        max_files=sys.maxsize if files == resource.RLIM_INFINITY else files,
    )


def _packages() -> dict[str, tuple[Requirement, str | None]] | None:
    try:
        wanted = [Requirement(line) for line in metadata.requires("slotmill") or ()]
    except metadata.PackageNotFoundError:
        return None
    return {
        each.name: (each, _installed(each.name)) for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})
    }


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The version of NVIDIA's kernel module."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER.read_text())
    except OSError:
        return None
    return found[0] if found else None


def _located(model: str) -> Path | ConfigError | None:
    from engine.model import locate

    try:
        return locate(model)
    except ConfigError as error:
        return error


def _port_error(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as worker/health.py does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror
    return None


def python(facts: MachineFacts) -> Finding:
    found = ".".join(map(str, facts.python))
    if facts.python < MIN_PYTHON:
        return fail(found, "install Python 3.11 or newer, then make setup PYTHON=python3.11")
    return ok(found)


def packages(facts: MachineFacts) -> Finding:
    if facts.packages is None:
        raise Unknown("slotmill is not installed, so nothing says what it needs", "pip install --editable .")
    wrong = [
        f"{wanted.name} {version or 'missing'}"
        for wanted, version in facts.packages.values()
        if version is None or not wanted.specifier.contains(version, prereleases=True)
    ]
    if wrong:
        asked = " ".join(f"'{wanted}'" for wanted, _ in facts.packages.values() if wanted.name in {w.split()[0] for w in wrong})
        return fail(f"outside the ranges: {', '.join(wrong)}", f"pip install {asked}")
    return ok(f"all {len(facts.packages)} within their ranges")


def torch(facts: MachineFacts) -> Finding:
    if isinstance(facts.torch, str):
        return fail(f"`python -m kernels.selfcheck`: {facts.torch}", _TORCH)
    found = _torch(facts)
    return ok(f"{found['torch']}, {'CUDA ' + found['cuda'] if found['cuda'] else 'without CUDA'}")


def gpu(facts: MachineFacts) -> Finding:
    driver = f"driver {facts.driver}" if facts.driver else "no driver"
    if not facts.num_gpus:
        return ok(f"none visible, {driver}: --cpu")
    found = _torch(facts)
    if not found["cuda"]:
        return fail(f"{facts.num_gpus} visible, {driver}, and a torch without CUDA", f"{_TORCH}; or worker start --cpu")
    if len(found["gpus"]) < facts.num_gpus:
        remedy = f"a newer driver, or a torch for an older CUDA than {found['cuda']}; nvidia-smi; or worker start --cpu"
        return fail(f"{facts.num_gpus} visible, {driver}, torch can use {len(found['gpus'])}", remedy)
    return ok(f"{', '.join(found['gpus'])}; {driver}")


def kernels(facts: MachineFacts) -> Finding:
    rows = _torch(facts)["kernels"]
    broken = [row for row in rows if isinstance(row["error"], str) or not row["error"] <= row["limit"]]
    if broken:
        worst = "; ".join(f"{row['name']} on {row['device']}: {row['error']} over {row['limit']:g}" for row in broken)
        return fail(f"differ from their twins: {worst}", f"{_TORCH}; or worker start on another device")
    texts = [f"{row['name']} on {row['device']}: {row['error']:.1e} of {row['limit']:g}" for row in rows]
    return ok(f"as near to their twins as they must be: {', '.join(texts)}")


def _torch(facts: MachineFacts) -> Mapping[str, Any]:
    if not isinstance(facts.torch, Mapping):
        raise Unknown("not asked" if facts.torch is None else "see torch")
    return facts.torch


def model(facts: MachineFacts) -> Finding:
    if isinstance(facts.found_model, ConfigError):
        said = str(facts.found_model).removeprefix("model: ")
        return fail(said, "mend --model; known aliases and forms are in worker start --help")
    if facts.found_model is None:
        return warn(f"{facts.model} is not on this machine: the first start fetches it", f"worker model path {facts.model}")
    return ok(str(facts.found_model))


def cache(facts: MachineFacts) -> Finding:
    if not facts.is_cache_writable:
        return fail(f"{facts.cache} cannot be written to", "SLOTMILL_CACHE_DIR=DIRECTORY of one's own")
    return ok(str(facts.cache))


def disk(facts: MachineFacts) -> Finding:
    found = f"{size(facts.free_disk_bytes)} free for converted models"
    if facts.free_disk_bytes < LOW_DISK_BYTES:
        return warn(found, "free space, or SLOTMILL_CACHE_DIR=DIRECTORY on a larger disk")
    return ok(found)


def ram(facts: MachineFacts) -> Finding:
    found = f"{size(facts.free_memory_bytes)} free"
    if facts.free_memory_bytes < LOW_MEMORY_BYTES:
        return warn(found, "a smaller --model, --dtype bfloat16, --kv-memory below 0.25")
    return ok(found)


def port(facts: MachineFacts) -> Finding:
    if facts.port_error is not None:
        remedy = "worker start --metrics-port 0; not needed if a worker that runs here is what has it"
        return warn(f"127.0.0.1:{facts.port}: {facts.port_error}", remedy)
    return ok(f"127.0.0.1:{facts.port} is free for metrics")


def files(facts: MachineFacts) -> Finding:
    found = f"{facts.max_files} open files" if facts.max_files < sys.maxsize else "open files without limit"
    return warn(found, f"ulimit -n {FEW_FILES}, or LimitNOFILE of the unit") if facts.max_files < FEW_FILES else ok(found)


CHECKS: Final = (python, packages, torch, gpu, kernels, model, cache, disk, ram, port, files)
"""In the order of the table in docs/operations.md, which says what each of them wants."""
NEED_TORCH: Final = (torch, gpu, kernels)
