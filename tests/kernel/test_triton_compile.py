"""Every Triton kernel compiles for the GPUs it is written for, within their limits; docs/kernels.md lists what is compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.triton.compile import BEGIN, END, SHARED_LIMITS, modules

pytestmark = pytest.mark.timeout(900)  # compiling takes a minute or two of a core, and the first test waits for it
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the command writes. A process of its own, since here kernels are interpreted."""
    path = tmp_path_factory.mktemp("compiled") / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.triton.compile", "--jobs", "2", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


def labels(report: list[dict[str, Any]]) -> list[str]:
    return [f"{kernel['module']}.{kernel['name']} sm_{kernel['target']}" for kernel in report]


def offered() -> list[tuple[str, str]]:
    return [(module, found.name) for module, specialisations in modules() for found in specialisations]


def test_every_kernel_compiles_for_every_target(report: list[dict[str, Any]]) -> None:
    expected = [
        f"{module}.{found.name} sm_{target}"
        for module, specialisations in modules()
        for found in specialisations
        for target in SHARED_LIMITS
        if target >= found.least_target
    ]
    assert labels(report) == expected


def test_no_kernel_spills_registers(report: list[dict[str, Any]]) -> None:
    assert labels([kernel for kernel in report if kernel["spilled_bytes"]]) == []


def test_no_kernel_needs_more_shared_memory_than_there_is(report: list[dict[str, Any]]) -> None:
    assert labels([kernel for kernel in report if kernel["shared_bytes"] > SHARED_LIMITS[kernel["target"]]]) == []


def test_names_are_unique() -> None:
    assert len(set(offered())) == len(offered())


def test_the_table_in_the_docs_has_a_line_for_every_kernel() -> None:
    lines = (ROOT / "docs/kernels.md").read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    listed = [tuple(cell.strip(" `") for cell in line.split("|")[1:3]) for line in lines]
    assert listed == offered(), "run: python -m kernels.triton.compile --sass --docs docs/kernels.md"


def test_every_argument_of_a_kernel_is_given() -> None:
    for module, specialisations in modules():
        for found in specialisations:
            given = (*found.signature, *found.constexprs)
            assert sorted(given) == sorted(found.kernel.arg_names), f"{module}.{found.name}"


def test_interpreted_kernels_are_refused_in_one_line() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "kernels.triton.compile"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "TRITON_INTERPRET is set: the interpreter's kernels cannot be compiled; unset it\n"
