"""Runs compiled kernels on all of torch's threads.

Relies on the OpenMP runtime that torch has loaded, through the entry point that compilers call for a parallel region: kernels
then share torch's threads and its settings instead of bringing threads of their own, which would compete for the cores. What
runs is a list of operations, usually one; kernels/cpu/program.py is compiled for all of them.
"""

import ctypes
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import torch

MULTIPLY, QUANTISE, RMS_NORM, SILU_AND_MUL, WRITE, ROTATE_AND_WRITE, ATTEND = range(7)
"""Operations; the arguments of each are the words that its function reads."""
WORDS = 24
"""Of an operation: which it is, its counter of pieces taken, its arguments."""


def run(operation: int, *arguments: int, pieces: int) -> None:
    """Run one operation on as many threads as `pieces` of work keep busy."""
    words = array("q", (operation, 0, *arguments))
    run_all(words.buffer_info()[0], 1, 0, min(torch.get_num_threads(), pieces))


def run_all(operations: int, count: int, barriers: int, num_threads: int) -> None:
    """Run operations one after the other, all threads at each of them together.

    Args:
        operations: address of `count` times `WORDS` words, counters zeroed.
        count: how many.
        barriers: address of `count` words, zeroed; not read for a single operation.
        num_threads: most threads to use.
    """
    from kernels.cpu.program import program  # it is made of what calls this

    region, team = _openmp()
    is_parallel = num_threads > 1 and region is not None
    words = array("q", (operations, count, barriers, team if is_parallel else 0))
    if is_parallel:
        region(program.address, words.buffer_info()[0], num_threads, 0)
    else:
        program.ctypes(words.buffer_info()[0])


@cache
def _openmp() -> tuple[Any, int]:
    """`GOMP_parallel(function, argument, threads, flags)` and the address of `omp_get_num_threads`; None without OpenMP."""
    bundled = [str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib[gi]omp*")]
    for name in (None, *bundled):
        try:
            library = ctypes.CDLL(name)
            region, team = library.GOMP_parallel, ctypes.cast(library.omp_get_num_threads, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        region.argtypes, region.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        return region, team or 0
    return None, 0
