"""`worker demo` as a user runs it: a real server, worker and model. Whatever happens, nothing is left behind."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import redis

from tests.support.wait import wait_until
from worker import demo
from worker.embedded import EmbeddedServer


class Demo:
    """One `worker demo` in a process group of its own, piped, with a private folder for temporary files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-m", "worker.cli", "demo", *arguments],
            env=os.environ | {"TMPDIR": str(folder), "HF_HUB_OFFLINE": "1", "DEMO_TEST_MARK": self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._seen: set[psutil.Process] = set()
        self.lines: list[str] = []

    def read_until(self, beginning: str) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(beginning):
                return
        raise AssertionError(f"no line begins with {beginning!r}: {self.lines}")

    def press_ctrl_c(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        """Reads on to the end, through the same buffer: `communicate` would lose the lines it holds since `read_until`."""
        assert self._process.stdout
        self.lines += [line.rstrip("\n") for line in self._process.stdout]
        return self._process.wait(timeout=60)

    def processes(self) -> set[psutil.Process]:
        """What runs of everything that the demo started, itself included: by a mark in the environment, and by descent (the
        server overwrites its environment with its title)."""
        self._seen |= {process for process in psutil.process_iter() if self._is_marked(process)}
        for process in set(self._seen):
            with suppress(psutil.Error):
                self._seen |= set(process.children(recursive=True))
        return {process for process in self._seen if process.is_running() and not self._is_zombie(process)}

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("DEMO_TEST_MARK") == self._mark
        except psutil.Error:
            return False

    def _is_zombie(self, process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True

    def files(self) -> list[str]:
        """Temporary files of ours; torch keeps a cache folder of its own there."""
        return [path.name for path in self._folder.iterdir() if not path.name.startswith("torchinductor_")]

    def clear_away(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self._process.communicate()


Start = Callable[..., Demo]


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Start]:
    started: list[Demo] = []

    def start(*arguments: str) -> Demo:
        started.append(Demo(tmp_path, *arguments))
        return started[-1]

    yield start
    for shown in started:
        shown.clear_away()


def test_piped_it_answers_paris_prints_where_the_slots_went_and_leaves_nothing(start_demo: Start) -> None:
    shown = start_demo()
    shown.read_until("[ 1/12]")
    assert len(shown.processes()) >= 4, "the demo, the server, the worker and its engine"
    assert shown.wait() == 0, shown.lines
    (paris,) = [line for line in shown.lines if "capital of France" in line]
    assert "Paris" in paris.split("->")[1]
    assert len([line for line in shown.lines if line.startswith("[")]) == 12
    table = {line.split()[0]: line for line in shown.lines if line.strip()}
    assert {"decode", "prefill", "no_work", "slot-steps", "preemptions", "KV"} <= set(table)
    assert "\x1b" not in "".join(shown.lines)
    assert shown.processes() == set()
    assert shown.files() == []


@pytest.mark.parametrize("moment", ["loading", "[ 1/12]"])
def test_ctrl_c_leaves_nothing_running(start_demo: Start, moment: str) -> None:
    shown = start_demo()
    shown.read_until(moment)
    assert len(shown.processes()) >= 3, "the demo, the server and the worker"
    shown.press_ctrl_c()
    assert shown.wait() == 3, shown.lines
    assert shown.processes() == set()
    assert shown.files() == []


def test_a_model_that_does_not_exist_is_one_line_and_exit_code_six(start_demo: Start) -> None:
    shown = start_demo("--model", "/nowhere/at/all")
    assert shown.wait() == 6, shown.lines
    assert "/nowhere/at/all" in shown.lines[-1]
    assert "Traceback" not in "".join(shown.lines)
    assert shown.processes() == set()


def test_a_killed_demo_takes_server_and_worker_with_it(start_demo: Start) -> None:
    shown = start_demo()
    shown.read_until("ready")
    assert len(shown.processes()) >= 4, "the demo, the server, the worker and its engine"
    shown.kill()
    wait_until(lambda: not shown.processes(), timeout_s=20, message="server, worker and engine are gone")


def test_a_server_of_the_users_own_is_left_as_it_was() -> None:
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        client.set("mine", "1")
        assert demo.run(redis_url=server.url, cpu=True, num_prompts=2, max_tokens=4, plain=True) == 0
        assert client.keys("*") == [b"mine"]
