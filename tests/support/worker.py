"""`worker start` as a process with the fake engine inside, its log, its probes and its metrics."""

import json
import shlex
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support import fake_engine
from tests.support.wait import wait_until

START = (sys.executable, "-m", "worker.cli", "start")


class WorkerUnderTest:
    """One worker process. What it logs is in `log`, as maps."""

    def __init__(self, *options: str, delay_s: float = 0.002) -> None:
        engine = shlex.join(fake_engine.command(delay_s))
        command = [*START, "--cpu", "--metrics-port", "0", "--engine-command", engine, *options]
        self.process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.log: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

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
        return [child for child in self.process.children() if "fake_engine.py" in " ".join(child.cmdline())]

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
        psutil.wait_procs(family, timeout=5)
        self.process.wait(5)
        self._listener.join(5)
        self.process.stderr.close()

    def _listen(self) -> None:
        for raw in self.process.stderr:
            self.lines.append(raw.decode().rstrip())
            if raw.startswith(b"{"):
                self.log.append(json.loads(raw))


@contextmanager
def workers(url: str, queue: str, model: Path) -> Iterator["WorkerMaker"]:
    """A factory of workers on one queue; all are gone at the end."""
    maker = WorkerMaker(url, queue, model)
    try:
        yield maker
    finally:
        for worker in maker.made:
            worker.close()


class WorkerMaker:
    """Calling it starts a worker and waits until it is ready, unless told not to."""

    def __init__(self, url: str, queue: str, model: Path) -> None:
        self._common = ("--redis-url", url, "--queue", queue, "--model", str(model), "--served-name", "fake")
        self.made: list[WorkerUnderTest] = []

    def __call__(self, *options: str, delay_s: float = 0.002, is_awaited: bool = True) -> WorkerUnderTest:
        worker = WorkerUnderTest(*self._common, *options, delay_s=delay_s)
        self.made.append(worker)
        return worker.wait_until_ready() if is_awaited else worker
