"""All that only a GPU can tell, in one command: are the kernels right, is the engine, how near are both to the hardware.

    python -m bench.gpu [--minutes 8] [--json OUT] [--part NAME ...] [--device cuda:0] [--dry-run]

Each part runs in a process of its own and is a list of cases. A case that fails is recorded and the next one goes on; where a
failure takes the process or the device's context along, a new process goes on behind it. Every part has a share of the time,
and hands on what it leaves. Results are written to OUT after every case, so that nothing is lost when the machine is.
`--dry-run` does everything with tiny sizes on the CPU in this process, to try the code. What is measured lives in
bench/gpu_kernels.py and bench/gpu_engine.py.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import click

MARK = "@case "
"""What begins a line that a part says to its parent; others are for people."""
GRACE_S = 5.0
Case = tuple[str, Callable[[], dict[str, Any]]]
"""A name, and what computes its figures."""


@dataclass(frozen=True)
class Part:
    """Cases that share a process."""

    place: str
    """Module and function: `(device, is_dry) -> iterator of cases`, the most important first."""
    share_s: float
    """Seconds of eight minutes."""


PARTS = {
    "environment": Part("bench.gpu_kernels:environment", 15),
    "kernels": Part("bench.gpu_kernels:against_twins", 85),
    "parity": Part("bench.gpu_engine:parity", 90),
    "bandwidth": Part("bench.gpu_kernels:bandwidth", 80),
    "small": Part("bench.gpu_engine:small", 75),
    "large": Part("bench.gpu_engine:large", 100),
    "peer": Part("bench.gpu_engine:peer", 35),
}


@dataclass
class Report:
    """Rows so far, on the screen and in a file."""

    json_path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.rows.append({"part": part, **row})
        click.echo(f"{time.monotonic() - self.started:6.1f} s  {part:12s} {line(row)}")
        if self.json_path:
            self.json_path.write_text(json.dumps({"command": " ".join(sys.argv), "rows": self.rows}, indent=1) + "\n")

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "error" in row or row.get("ok") is False]


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    figures = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()]
    return "  ".join(figures).removeprefix("name ")


@click.command(help=__doc__)
@click.option("--minutes", type=float, default=8.0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="write results to this file")
@click.option("--part", "names", type=click.Choice(list(PARTS)), multiple=True, help="only this one; repeatable")
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--dry-run", "is_dry", is_flag=True, help="tiny sizes on the CPU, in this process")
@click.option("--child", hidden=True, type=float, help="be the process of the one part, for so many seconds")
@click.option("--skip", hidden=True, multiple=True)
def main(
    minutes: float,
    json_path: Path | None,
    names: tuple[str, ...],
    device: str,
    is_dry: bool,
    child: float | None,
    skip: tuple[str, ...],
) -> None:
    device = "cpu" if is_dry else device
    if child is not None:
        be_part(names[0], child, device, is_dry, skip)
        return
    report = Report(json_path)
    chosen = {name: PARTS[name] for name in names or PARTS}
    total, left = sum(part.share_s for part in chosen.values()), 60 * minutes
    for name, part in chosen.items():
        seconds = left * part.share_s / total
        before = time.monotonic()
        if is_dry:
            for row in run_cases(cases_of(part, device, is_dry), before + seconds):
                report.add(name, row)
        else:
            command = [sys.executable, "-m", "bench.gpu", "--part", name, "--device", device]
            supervise(command, name, seconds, report)
        left -= time.monotonic() - before
        total -= part.share_s
    show(report)
    sys.exit(1 if report.failures else 0)


def cases_of(part: Part, device: str, is_dry: bool) -> Iterator[Case]:
    module, _, function = part.place.partition(":")
    found: Iterator[Case] = getattr(import_module(module), function)(device, is_dry)
    return found


def run_cases(
    cases: Iterator[Case], deadline: float, skip: tuple[str, ...] = (), on_start: Callable[[str], object] = str
) -> Iterator[dict[str, Any]]:
    """The row of each case; one that fails has an `error`, one that there is no time for is `left_out`."""
    for name, compute in cases:
        if name in skip:
            continue
        started = time.monotonic()
        if started > deadline:
            yield {"name": name, "left_out": True}
            continue
        on_start(name)
        try:
            figures = compute()
        except Exception as error:  # noqa: BLE001 - of every kind: what it was is the result
            figures = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        yield {"name": name, **figures, "took_s": round(time.monotonic() - started, 2)}


def be_part(name: str, seconds: float, device: str, is_dry: bool, skip: tuple[str, ...]) -> None:
    """Run the cases of a part and tell the parent of each, at its start and at its end."""
    import torch

    def say(row: dict[str, Any]) -> None:
        sys.stderr.write(f"{MARK}{json.dumps(row)}\n")
        sys.stderr.flush()

    cases = cases_of(PARTS[name], device, is_dry)
    for row in run_cases(cases, time.monotonic() + seconds, skip, lambda case: say({"start": case})):
        say(row)
        if device != "cpu":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:
                os._exit(3)  # the context is lost: the cases that are left need a new process


def supervise(command: list[str], part: str, seconds: float, report: Report) -> None:
    """Run a part until its time is over; after a process that died, again without the cases that it had begun."""
    end, begun = time.monotonic() + seconds, []
    while (left := end - time.monotonic()) > 0:
        skipped = [word for name in begun for word in ("--skip", name)]
        before = len(begun)
        code = _run_process([*command, "--child", str(left), *skipped], part, end + GRACE_S, begun, report)
        if code == 0 or code is None or len(begun) == before:
            if code and len(begun) == before:
                report.add(part, {"name": "process", "error": f"ended with code {code} before its next case"})
            return


def _run_process(command: list[str], part: str, end: float, begun: list[str], report: Report) -> int | None:
    """The exit code, or None where it was killed at the end of its time."""
    current: str | None = None
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for text in _lines(process, end):
            if not text.startswith(MARK):
                sys.stderr.write(text)
                continue
            row = json.loads(text.removeprefix(MARK))
            if "start" in row:
                current = row["start"]
                begun.append(current)
            else:
                report.add(part, row)
                current = None
        code = process.poll()
        if code is None:
            process.kill()
    if current is not None:
        why = "its time was over" if code is None else f"the process ended with code {code}"
        report.add(part, {"name": current, "error": why})
    return code


def _lines(process: subprocess.Popen[str], end: float) -> Iterator[str]:
    """What the process says until it ends, or its time is over."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    pending = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            text = process.stderr.read()
            if not text:
                process.wait(GRACE_S)
                break
            *whole, pending = (pending + text).split("\n")
            yield from (each + "\n" for each in whole)


def show(report: Report) -> None:
    """All rows by part, and what failed."""
    for part in dict.fromkeys(row["part"] for row in report.rows):
        click.echo(f"\n== {part}")
        for row in report.rows:
            if row["part"] == part:
                click.echo("  " + line({name: value for name, value in row.items() if name not in ("part", "took_s")}))
    click.echo(f"\n{len(report.rows)} cases, {len(report.failures)} failed")
    for row in report.failures:
        click.echo(f"  FAILED {row['part']}: {line(row)}")


if __name__ == "__main__":
    main()
