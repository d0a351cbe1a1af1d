"""How the CPU kernels are run and kept: threads, a machine without OpenMP, the cache of compiled code, and what is said."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba.core import event
from numba.core.caching import FunctionCache

from kernels.cpu import layers, program, threads
from kernels.cpu.linear import PackedLinear

ROOT = Path(__file__).parents[2]


def product() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return PackedLinear(torch.randn(300, 64, generator=generator))(torch.randn(40, 64, generator=generator))


def test_without_openmp_one_thread_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = product()
    monkeypatch.setattr(threads, "_openmp", lambda: (None, 0))

    assert torch.equal(product(), expected)


def test_a_machine_without_openmp_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str | None) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(threads.ctypes, "CDLL", refuse)

    assert threads._openmp.__wrapped__() == (None, 0)


def test_a_library_without_the_entry_point_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.ctypes, "CDLL", lambda name: object())

    assert threads._openmp.__wrapped__() == (None, 0)


def test_here_there_are_threads() -> None:
    region, team = threads._openmp()

    assert region is not None
    assert team


def test_no_thread_begins_an_operation_before_all_have_ended_the_last() -> None:
    """Of three pieces of a product two go to one thread; the other one is early, and a norm reads all columns."""
    draw = torch.Generator().manual_seed(0)
    linear, x = PackedLinear(torch.randn(192, 4096, generator=draw)), torch.randn(32, 4096, generator=draw)
    weight, expected = torch.ones(192), layers.rms_norm(linear(x), torch.ones(192), 1e-5)[0]

    for _ in range(20):
        product, normed = torch.zeros(32, 192), torch.zeros(32, 192)
        operations, barriers = np.zeros((2, threads.WORDS), dtype=np.int64), np.zeros(2, dtype=np.int64)
        norm = layers.norm_words(product, None, weight, 1e-5, normed, product)
        for row, code, words in ((0, threads.MULTIPLY, linear.words(x, None, None, product)), (1, threads.RMS_NORM, norm)):
            operations[row, : 2 + len(words)] = (code, 0, *words)
        threads.run_all(operations.ctypes.data, 2, barriers.ctypes.data, 2)
        assert torch.equal(normed, expected)


def test_a_change_in_any_source_is_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text("")
    monkeypatch.setattr(program, "__file__", str(tmp_path / "program.py"))
    digests = {program._sources()}
    for text in ("1", "2"):
        (tmp_path / "vectors.py").write_text(text)
        digests.add(program._sources())

    assert len(digests) == 3


def test_the_digest_of_the_sources_is_part_of_the_key_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Callable[..., Any] = lambda *_, **__: lambda function: function  # noqa: E731
    monkeypatch.setattr(program, "cfunc", plain)

    def key(digest: int) -> Any:
        return FunctionCache(program._compile(digest))._index_key((), _Machine())

    assert key(1) == key(1)
    assert key(1) != key(2)


class _Machine:
    @staticmethod
    def magic_tuple() -> tuple[str]:
        return ("any processor",)


def test_compiling_is_announced_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def compile_two(*_: Any, **__: Any) -> Any:
        for _ in range(2):
            with event.trigger_event("numba:compile"):
                pass
        return lambda function: function

    monkeypatch.setattr(program, "cfunc", compile_two)
    with caplog.at_level(logging.INFO, "kernels.cpu.program"):
        program._compile(1)

    first, last = caplog.messages
    assert first == "compiling kernels for this processor, once; about a quarter of a minute"
    assert last.startswith("compiled kernels in ")


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, cache: bool = False) -> Any:
        if cache:
            raise RuntimeError("cannot cache function 'program': no locator available for file 'program.py'")
        return lambda function: "compiled"

    monkeypatch.setattr(program, "cfunc", refuse)

    assert program._compile(1) == "compiled"


def test_compiled_code_is_found_by_the_next_process() -> None:
    """The tests before have compiled it, or this import does."""
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout); "
        "from kernels.cpu.program import program; print(program.cache_hits)"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout == "1\n"
