"""The compiled program of all CPU kernels: a list of operations that all threads work through together.

Threads take pieces of an operation until there are none, and meet before the next one. One compiled function serves single
operations and whole stacks of layers, so everything is compiled once, on the first use, and kept in numba's cache on disk.
"""

import hashlib
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types
from numba.core import event

from kernels.cpu.attention import attend
from kernels.cpu.kv import rotate_and_write, write
from kernels.cpu.layers import rms_norm_rows, silu_and_mul_rows
from kernels.cpu.linear import multiply, round_rows
from kernels.cpu.threads import ATTEND, MULTIPLY, QUANTISE, RMS_NORM, ROTATE_AND_WRITE, SILU_AND_MUL, WORDS, WRITE
from kernels.cpu.vectors import arrive, call, give_way, seen, word

SPINS = 2000
"""Looks at a barrier before the core is offered to others: some 20 us, longer than threads that have a core apart wait."""

_logger = logging.getLogger(__name__)


class _Announcement(event.Listener):
    """Says so when numba compiles, which it does not where its cache has the code."""

    def __init__(self) -> None:
        self._started: float | None = None

    def on_start(self, _event: Any) -> None:
        """The first of all functions begins."""
        if self._started is None:
            self._started = time.monotonic()
            _logger.info("compiling kernels for this processor, once; about a quarter of a minute")

    def on_end(self, _event: Any) -> None:
        """One of them is done."""

    def conclude(self) -> None:
        """All of them are."""
        if self._started is not None:
            _logger.info("compiled kernels in %.0f s", time.monotonic() - self._started)


@njit
def _meet(barrier, team):
    """Wait for all threads of the team."""
    arrive(barrier, 1)
    looks = 0
    while seen(barrier) < team:
        looks += 1
        if looks > SPINS:
            give_way()


def _sources() -> int:
    """A digest of all the code that is compiled: numba looks for changes in this file alone."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7])


def _compile(sources: int) -> Any:
    """Compile the program, or take it from numba's cache, where closures are part of the key."""

    def program(words: int) -> None:
        """Run operations; the words are those that `threads.run_all` makes."""
        operations, count, barriers = word(words, 0), word(words, 1), word(words, 2)
        team = call(word(words, 3)) if word(words, 3) else 1 if sources else 0
        for index in range(count):
            operation = operations + 8 * WORDS * index
            kind, arguments = word(operation, 0), operation + 8
            if kind == MULTIPLY:
                multiply(arguments)
            elif kind == QUANTISE:
                round_rows(arguments)
            elif kind == RMS_NORM:
                rms_norm_rows(arguments)
            elif kind == SILU_AND_MUL:
                silu_and_mul_rows(arguments)
            elif kind == WRITE:
                write(arguments)
            elif kind == ROTATE_AND_WRITE:
                rotate_and_write(arguments)
            elif kind == ATTEND:
                attend(arguments)
            if team > 1 and index + 1 < count:
                _meet(barriers + 8 * index, team)

    compiler = partial(cfunc, types.void(types.int64))
    with event.install_listener("numba:compile", _Announcement()) as announcement:
        try:
            compiled = compiler(cache=True)(program)
        except RuntimeError:  # no folder for the cache can be written to: compiled at each start
            compiled = compiler()(program)
    announcement.conclude()
    return compiled


program = _compile(_sources())
