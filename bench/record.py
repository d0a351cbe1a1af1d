"""Records: what every benchmark writes, where it was made, and how it is written.

A record is a JSON file `{"kind", "machine", ...figures}`. Records that are kept are in bench/results, where bench/report.py
makes tables and plots of them.
"""

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import click
import psutil

from engine.config import usable_cores

RESULTS: Final = Path(__file__).parent / "results"
VECTOR_UNITS: Final = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")
"""Flags of /proc/cpuinfo, the most capable first: they decide which dtype is fast."""

json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="write the record to this file"
)


def record(kind: str, **figures: Any) -> dict[str, Any]:
    """The record of a run of this kind, made now, here."""
    return {"kind": kind, "machine": machine(), **figures}


def save(made: dict[str, Any], path: Path | None) -> None:
    """Write a record where a path is given."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made, indent=1) + "\n")


def machine() -> dict[str, str]:
    """Processor, Python, torch, date, commit and command of this run."""
    return {
        "processor": f"{processor()}, {usable_cores()} cores, {vector_unit()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "torch": installed("torch"),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": f"python -m {Path(sys.argv[0]).parent.name}.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}".strip(),
    }


def processor() -> str:
    """The processor's name, or the architecture's where it has none."""
    return _cpuinfo("model name") or platform.machine()


def vector_unit() -> str:
    """The most capable of `VECTOR_UNITS` that the processor has."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return next((unit for unit in VECTOR_UNITS if unit in flags), "no vector unit that is known here")


def installed(package: str) -> str:
    """A package's version, found without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    answer = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def engine_options(text: str) -> dict[str, Any]:
    """`dtype=float32,max_slots=64` as fields of `EngineConfig`: values are JSON where they parse as such, words elsewhere."""
    options = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _cpuinfo(field: str) -> str | None:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), None)
