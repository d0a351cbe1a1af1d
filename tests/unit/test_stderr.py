"""A stream that nobody waits for: full pipes, readers that leave, and what is lost then."""

import errno
import os
import pty
import select
import threading
import time
import tty
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from worker import stderr
from worker.stderr import Stderr

LINE = "x" * 999 + "\n"


class Pipe(NamedTuple):
    reader: int
    stream: Stderr

    def read(self, length: int) -> str:
        return os.read(self.reader, length).decode()

    def read_all(self) -> str:
        """What is in the pipe, and what was kept for it."""
        got = ""
        self.stream.drain()
        while select.select([self.reader], [], [], 0)[0]:
            got += self.read(65536)
            self.stream.drain()
        return got


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    monkeypatch.setattr(stderr, "EXIT_S", 0.01)
    reader, writer = os.pipe()
    yield Pipe(reader, Stderr(writer))
    os.close(reader)
    os.close(writer)


def write_beyond(pipe: Pipe, num_bytes: int) -> int:
    """So many more than the pipe holds; how many lines that were."""
    count = (65536 + num_bytes) // len(LINE) + 1
    for _ in range(count):
        pipe.stream.write(LINE)
    return count


def test_what_there_is_room_for_is_there_at_once(pipe: Pipe) -> None:
    pipe.stream.write("ä \ud800\n")
    assert pipe.read(10) == "ä \\ud800\n"


def test_a_full_pipe_costs_one_pause_and_no_line(pipe: Pipe) -> None:
    started = time.monotonic()
    count = write_beyond(pipe, 300_000)
    assert time.monotonic() - started < 1
    assert pipe.read_all() == LINE * count
    assert pipe.stream.take_num_lost() == 0


def test_what_cannot_be_kept_is_lost_in_whole_lines_and_counted(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr, "MAX_KEPT_BYTES", 10_000)
    count = write_beyond(pipe, 100_000)
    assert pipe.stream.take_num_lost() == 0, "nobody would read of it"
    got = pipe.read_all()
    lost = pipe.stream.take_num_lost()
    assert 80 < lost < count
    assert got == LINE * (count - lost)
    assert pipe.stream.take_num_lost() == 0


def test_a_line_longer_than_what_is_kept_is_written(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr, "MAX_KEPT_BYTES", 10)
    pipe.stream.write(LINE)
    assert pipe.read(len(LINE)) == LINE


@pytest.mark.parametrize("trouble", [errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF])
def test_a_stream_that_fails_is_no_trouble(pipe: Pipe, monkeypatch: pytest.MonkeyPatch, trouble: int) -> None:
    def fail(*_: object) -> int:
        raise OSError(trouble, "")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        pipe.stream.write(LINE)
    pipe.stream.write("next\n")
    assert pipe.read(5) == "next\n"


def test_a_pipe_whose_room_another_process_takes_is_not_waited_for(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Stderr, "_has_room", lambda *_: True)
        writing = threading.Thread(target=write_beyond, args=(pipe, 10_000), daemon=True)
        writing.start()
        writing.join(5)
        assert not writing.is_alive()
    assert pipe.read_all() == LINE * (75_536 // len(LINE) + 1)


def test_who_leaves_writes_all_when_another_process_took_the_room_for_a_moment(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stderr, "EXIT_S", 5)
    refusals, write = [BlockingIOError()] * 3, os.write

    def write_at_last(fd: int, data: bytes) -> int:
        if refusals:
            raise refusals.pop()
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_at_last)
    pipe.stream._kept += LINE.encode()
    pipe.stream.drain()
    assert not pipe.stream._kept
    assert pipe.read(2000) == LINE


def test_a_terminal_that_nobody_reads_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr, "EXIT_S", 0.01)
    reader, terminal = pty.openpty()
    tty.setraw(terminal)
    pipe = Pipe(reader, Stderr(terminal))
    writing = threading.Thread(target=write_beyond, args=(pipe, 300_000), daemon=True)
    writing.start()
    writing.join(5)
    stands_still = writing.is_alive()
    while writing.is_alive():
        pipe.read(65536)
    is_as_before = os.get_blocking(terminal)
    got = pipe.read_all()
    for fd in (reader, terminal):
        os.close(fd)
    assert not stands_still
    assert is_as_before, "the shell writes there too"
    assert got == LINE * (365_536 // len(LINE) + 1)
