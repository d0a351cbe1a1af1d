"""`worker start` as a process with the fake engine inside, its log, its probes and its metrics.

A `ForkedWorker` is the same, forked from a process that has imported everything: where hundreds are started, that costs a
fifth.
"""

import contextlib
import fcntl
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support import fake_engine
from tests.support.wait import wait_until

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["worker.cli", "worker.process", "tests.support.worker"])


class WorkerUnderTest:
    """One worker process. What it logs is in `log`, as maps."""

    def __init__(self, *options: str, delay_s: float = 0.002) -> None:
        engine = shlex.join(fake_engine.command(delay_s))
        self.process, self._stderr = self._start(
            ["start", "--cpu", "--metrics-port", "0", "--engine-command", engine, *options]
        )
        self.log: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    @staticmethod
    def _start(args: list[str]) -> tuple[psutil.Popen, IO[bytes]]:
        command = [sys.executable, "-m", "worker.cli", *args]
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return process, process.stderr

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.log if entry.get("event") == event]

    def wait_for_log(self, event: str, timeout_s: float = 10.0) -> dict[str, Any]:
        wait_until(lambda: self.logged(event) or self.process.poll() is not None, timeout_s, f"a log line {event}")
        assert self.logged(event), f"the worker left without a line {event}: {self.lines[-5:]}"
        return self.logged(event)[0]

    def wait_until_ready(self) -> "WorkerUnderTest":
        wait_until(lambda: self.get("/readyz")[0] == 200, 10.0, "a ready worker")
        return self

    def get(self, path: str) -> tuple[int, str]:
        base = self.wait_for_log("worker_started")["metrics"].removesuffix("/metrics")
        try:
            with urllib.request.urlopen(base + path, timeout=5) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def samples(self) -> dict[tuple[str, str], float]:
        """Every sample, by name without prefix and by its label values joined with a comma."""
        return {
            (sample.name.removeprefix("slotmill_"), ",".join(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
        }

    def metric(self, name: str, label: str = "") -> float:
        return self.samples()[name, label]

    def engine(self) -> psutil.Process:
        return self.engines()[0]

    def engines(self) -> list[psutil.Process]:
        return [child for child in self.process.children() if _is_engine(child)]

    def stop(self, how: int = signal.SIGTERM, timeout_s: float = 15.0) -> int:
        """Signal it, wait for its end, return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 15.0) -> int:
        code = self.process.wait(timeout_s)
        self._listener.join(timeout_s)
        return code

    def close(self) -> None:
        """End it and its engine, whatever state they are in."""
        family = [self.process]
        if self.process.is_running():
            family += self.process.children(recursive=True)
        for process in family:
            if process.is_running():
                process.kill()
        wait_until(lambda: not any(map(runs, family)), 5, "the end of a worker and its engine")
        self.process.wait(5)
        self._listener.join(5)
        self._stderr.close()

    def _listen(self) -> None:
        for raw in self._stderr:
            self.lines.append(raw.decode().rstrip())
            if raw.startswith(b"{"):
                self.log.append(json.loads(raw))


def _is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        return "--fd" in process.cmdline()
    return False


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended yet; one that has, and waits for an init system to note it, has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


class ForkedWorker(WorkerUnderTest):
    """One whose start costs little."""

    @staticmethod
    def _start(args: list[str]) -> tuple["_Forked", IO[bytes]]:
        ours, theirs = _forks.Pipe(duplex=False)
        with theirs:
            process = _forks.Process(target=_run, args=(theirs, args))
            process.start()
        return _Forked(process), os.fdopen(os.dup(ours.fileno()), "rb")


def _run(stderr: Connection, args: list[str]) -> None:
    from worker.cli import cli
    from worker.command import run

    os.dup2(stderr.fileno(), 2)
    stderr.close()
    sys.exit(run(cli, args))


class _Forked(psutil.Process):
    """A child of the fork server with what `Popen` has more than `Process`."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process = process
        super().__init__(process.pid)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise psutil.TimeoutExpired(timeout, self.pid)
        return code


@contextmanager
def workers(url: str, queue: str, model: Path) -> Iterator["WorkerMaker"]:
    """A factory of workers on one queue; all are gone at the end."""
    maker = WorkerMaker(url, queue, model)
    try:
        yield maker
    finally:
        for worker in maker.made:
            worker.close()


class Unread(WorkerUnderTest):
    """One whose log nobody reads any more once its engine is ready; the pipe is full after some lines."""

    def _listen(self) -> None:
        fcntl.fcntl(self._stderr, fcntl.F_SETPIPE_SZ, 4096)
        for raw in self._stderr:
            self.lines.append(raw.decode().rstrip())
            self.log.append(json.loads(raw))
            if self.logged("engine_ready"):
                return

    def hang_up(self) -> None:
        """The reader of its log is gone."""
        self._listener.join()
        self._stderr.close()


class WorkerMaker:
    """Calling it starts a worker and waits until it is ready, unless told not to."""

    def __init__(self, url: str, queue: str, model: Path) -> None:
        self._common = ("--redis-url", url, "--queue", queue, "--model", str(model), "--served-name", "fake")
        self.made: list[WorkerUnderTest] = []

    def __call__(
        self, *options: str, delay_s: float = 0.002, is_awaited: bool = True, kind: type[WorkerUnderTest] = WorkerUnderTest
    ) -> WorkerUnderTest:
        worker = kind(*self._common, *options, delay_s=delay_s)
        self.made.append(worker)
        return worker.wait_until_ready() if is_awaited else worker
