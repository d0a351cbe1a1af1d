"""Compiles every Triton kernel of this package for GPUs that are not at hand, and reports what each one takes of them.

    python -m kernels.triton.compile [--target 80,90,100] [--jobs 1] [--sass] [--json FILE] [--docs FILE]

Relies on `specialisations()` of the modules beside it and on the tools in Triton's wheel (ptxas, cuobjdump); needs no GPU and
no CUDA. `--sass` counts instructions too, which takes twice the time. `--json` writes a list of objects with the fields of
`Compiled`; `--docs` puts the table into a page, between its markers.
"""

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton as package
from kernels.triton.specialisation import Specialisation

SHARED_LIMITS = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that one block of threads can have on each target; CUDA programming guide, compute capabilities."""
BEGIN, END = "<!-- compiled kernels: begin -->", "<!-- compiled kernels: end -->"
_WIDE_LOAD = re.compile(r"\bLDG(?:STS)?\.\S*(?:128|256)\b")
_MATRIX = re.compile(r"\b((?:H|I|Q)G?MMA|UTC\w*MMA)\b")


class Compiled(NamedTuple):
    """What one kernel takes on one target."""

    module: str
    name: str
    target: int
    """Compute capability, 90 for 9.0."""
    registers: int
    """Of each thread."""
    num_warps: int
    spilled_bytes: int
    """Of each thread's registers, in memory: its stack, for Triton puts nothing else there."""
    shared_bytes: int
    wide_loads: int | None
    """Instructions that load 16 bytes or more a thread from global memory; None if they were not counted."""
    matrix_ops: dict[str, int] | None
    """Instructions of the tensor cores by name; None as before."""


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    if knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: the interpreter's kernels cannot be compiled; unset it")
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("--target", default="80,90,100", help="compute capabilities (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--sass", action="store_true", help="count instructions too")
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument("--docs", type=Path, help="page whose table is replaced")
    options = parser.parse_args(arguments)
    report = compile_all([int(target) for target in options.target.split(",")], jobs=options.jobs, with_sass=options.sass)
    if options.json:
        options.json.write_text(json.dumps([compiled._asdict() for compiled in report], indent=1) + "\n")
    if options.docs:
        before, rest = options.docs.read_text().split(BEGIN)
        options.docs.write_text(f"{before}{BEGIN}\n{table(report)}{END}{rest.split(END)[1]}")
    sys.stdout.write(table(report))


def compile_all(targets: list[int], *, jobs: int = 1, with_sass: bool = False) -> list[Compiled]:
    """Build everything anew, whatever is in Triton's cache. An error of the compiler names its kernel and target."""
    work = [(module, index) for module, found in modules() for index in range(len(found))]
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TRITON_CACHE_DIR"] = directory
        compile_one = partial(_compile, targets, with_sass)
        if jobs == 1:
            found = list(map(compile_one, work))
        else:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                found = list(pool.map(compile_one, work))
    return [compiled for part in found for compiled in part]


def modules() -> Iterator[tuple[str, list[Specialisation]]]:
    """The modules of this package that have kernels, and what they offer."""
    for info in pkgutil.iter_modules(package.__path__):
        module: Any = None if info.name == "compile" else importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, "specialisations"):
            yield info.name, module.specialisations()


def table(report: list[Compiled]) -> str:
    """In Markdown, a line for each kernel and a column for each target."""
    targets = sorted({compiled.target for compiled in report})
    lines = ["| module | kernel | warps | " + " | ".join(f"sm_{target}" for target in targets) + " |"]
    lines.append("|---" * (3 + len(targets)) + "|")
    for (module, name), found in groupby(report, key=lambda compiled: (compiled.module, compiled.name)):
        parts = {compiled.target: compiled for compiled in found}
        warps = next(iter(parts.values())).num_warps
        cells = [_cell(parts[target]) if target in parts else "" for target in targets]
        lines.append(f"| `{module}` | `{name}` | {warps} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _compile(targets: list[int], with_sass: bool, work: tuple[str, int]) -> list[Compiled]:
    """One specialisation, named by its module and its place there: a kernel cannot be sent to another process."""
    module, index = work
    specialisation = importlib.import_module(f"{package.__name__}.{module}").specialisations()[index]
    return [_report(module, specialisation, target, with_sass) for target in targets if target >= specialisation.least_target]


def _report(module: str, specialisation: Specialisation, target: int, with_sass: bool) -> Compiled:
    try:
        kernel = build(specialisation, target)
    except Exception as error:
        error.add_note(f"kernel {module}.{specialisation.name}, target sm_{target}")
        raise
    text = _dump(kernel.asm["cubin"], with_sass)
    registers, stack, local = (
        int(number) for name in ("REG", "STACK", "LOCAL") for number in re.findall(rf"{name}:(\d+)", text)
    )
    return Compiled(
        module,
        specialisation.name,
        target,
        registers,
        num_warps=kernel.metadata.num_warps,
        spilled_bytes=stack + local,
        shared_bytes=kernel.metadata.shared,
        wide_loads=len(_WIDE_LOAD.findall(text)) if with_sass else None,
        matrix_ops=dict(Counter(_MATRIX.findall(text))) if with_sass else None,
    )


def build(specialisation: Specialisation, target: int) -> Any:
    """Triton's compiled kernel for a compute capability. Products and sums are fused, as in a launch with Triton's defaults."""
    names, given = specialisation.kernel.arg_names, specialisation.signature
    signature = {name: given[name].split(":")[0] if name in given else "constexpr" for name in names}
    is_aligned = [given.get(name, "").startswith("*") or given.get(name, "").endswith(":16") for name in names]
    attributes = {(index,): [["tt.divisibility", 16]] for index, aligned in enumerate(is_aligned) if aligned}
    source = ASTSource(specialisation.kernel, signature, specialisation.constexprs, attributes)
    options = {"enable_fp_fusion": True, **specialisation.options}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def _dump(cubin: bytes, with_sass: bool) -> str:
    """Resource usage, and instructions if they are wanted."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", *["--dump-sass"] * with_sass, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _cell(compiled: Compiled) -> str:
    parts = [f"{compiled.registers} registers"]
    parts += [f"{compiled.spilled_bytes} B spilled"] if compiled.spilled_bytes else []
    parts += [f"{compiled.shared_bytes} B shared"] if compiled.shared_bytes else []
    parts += [f"{compiled.wide_loads} wide loads"] if compiled.wide_loads else []
    return ", ".join(parts + [f"{count} {name}" for name, count in sorted((compiled.matrix_ops or {}).items())])


if __name__ == "__main__":
    main()
