"""A file of lines that one process appends to, whole line by whole line.

Leaves what a line says to its caller.

1. While it is open no other process has it (flock), and what it replaces it with is locked before it has the name.
2. A line that cannot be written whole is taken back, so that the file ends with a newline whenever nobody writes.
3. What was appended is on the disk within `SYNC_S`, by a thread, whatever the caller does meanwhile.
"""

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from worker.errors import InvalidOption, SlotmillError

SYNC_S = 1.0
_COPY_BYTES = 1 << 20


class AppendedFile:
    """Use as a context manager; leaving closes without a sync."""

    size: int
    """In bytes, all of it whole lines after `recover`."""

    def __init__(self, path: Path, option: str, *, is_new: bool) -> None:
        """Create the file, or open it unless it `is_new`. `InvalidOption`, for `option`, where that cannot be."""
        self._path = path
        self._is_new = is_new
        self._fd = _open(path, option, os.O_EXCL if is_new else 0)
        self.size = os.fstat(self._fd).st_size
        self._is_synced = True
        self._sync_lock = threading.Lock()
        self._failure: OSError | None = None
        self._is_closing = threading.Event()
        self._syncing = threading.Thread(target=self._sync_often, name=f"sync {path.name}", daemon=True)

    def __enter__(self) -> Self:
        self._syncing.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_closing.set()
        self._syncing.join()
        if error is not None and self._is_new and not self.size:  # so that nothing is in the way of the next try
            self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def recover(self, take: Callable[[bytes], bool]) -> int:
        """Show `take` each line that was written before, and drop those that it refuses, or that are torn; how many."""
        kept_end = end = num_dropped = 0
        holes: list[tuple[int, int]] = []
        with self._path.open("rb", buffering=_COPY_BYTES) as file:
            for line in file:
                if line.endswith(b"\n") and (not line.strip() or take(line)):
                    if kept_end < end:
                        holes.append((kept_end, end))
                    kept_end = end + len(line)
                else:
                    num_dropped += 1
                end += len(line)
        if holes:
            self._rewrite(holes, kept_end)
        elif kept_end < end:
            self._cut(kept_end)
        return num_dropped

    def append(self, line: bytes) -> None:
        """Write a line, its newline included. `SlotmillError` when there is no room; the file is as it was."""
        self._check()
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError as error:
            os.ftruncate(self._fd, self.size)
            raise self._failed(error) from None
        except BaseException:  # a signal's
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(line)
        self._is_synced = False

    def sync(self) -> None:
        """Return when all that was appended is on the disk."""
        with self._sync_lock:
            if self._failure is None and not self._is_synced:
                self._is_synced = True  # before, so that a line appended meanwhile is not forgotten
                try:
                    os.fsync(self._fd)
                    if not os.path.samestat(os.fstat(self._fd), self._path.stat()):
                        raise FileNotFoundError(errno.ENOENT, "another file has its name by now")
                except OSError as error:
                    self._failure = error
        self._check()

    def _sync_often(self) -> None:
        while not self._is_closing.wait(SYNC_S):
            with contextlib.suppress(SlotmillError):  # the next append tells it
                self.sync()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failed(self._failure)

    def _failed(self, error: OSError) -> SlotmillError:
        remedy = "put it back" if error.errno == errno.ENOENT else "make room"
        return SlotmillError(f"{self._path}: {error.strerror}; what was synced is kept; {remedy}, and go on with --resume")

    def _cut(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        self.size = size

    def _rewrite(self, holes: list[tuple[int, int]], end: int) -> None:
        """The lines between the holes, as a new file under the same name."""
        path = Path(os.path.realpath(self._path))
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            os.fchmod(fd, os.fstat(self._fd).st_mode & 0o7777)
            fcntl.flock(fd, fcntl.LOCK_EX)
            with path.open("rb") as source:
                for start, stop in zip((0, *(hole[1] for hole in holes)), (*(hole[0] for hole in holes), end), strict=True):
                    _copy(source.fileno(), fd, start, stop)
            os.fsync(fd)
            Path(name).replace(path)
            sync_directory(path.parent)
        except OSError as error:
            os.close(fd)
            Path(name).unlink(missing_ok=True)
            raise self._failed(error) from None
        os.close(self._fd)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
        self._fd, self.size = fd, os.fstat(fd).st_size


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file so that at any time there is the old one or the new one. `SlotmillError` when there is no room."""
    own = path.with_name(f".{path.name}.new")  # its writer holds a lock, so that there is one at most
    try:
        with own.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        own.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise SlotmillError(f"{path}: {error.strerror}; make room, and go on with --resume") from None


def sync_directory(directory: Path) -> None:
    """Put on the disk which files it has."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(path: Path, option: str, flags: int) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | flags, 0o666)
    except OSError as error:
        is_there = error.errno == errno.EEXIST
        problem = "is there already; go on with --resume, or" if is_there else f"{error.strerror};"
        raise InvalidOption(f"{option}: {path}: {problem} write to another file") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidOption(f"{option}: {path}: no regular file; lines are synced, and read again when resumed")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), path.stat()):  # whoever had it has just replaced it
            raise BlockingIOError
        sync_directory(path.parent)
    except BlockingIOError:
        os.close(fd)
        raise InvalidOption(f"{option}: {path}: another process writes it; wait for its end, or write elsewhere") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _copy(source: int, target: int, start: int, stop: int) -> None:
    while start < stop:
        data = os.pread(source, min(_COPY_BYTES, stop - start), start)
        start += len(data)
        while data:
            data = data[os.write(target, data) :]
