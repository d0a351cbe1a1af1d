"""The command, or its engine, killed at random in the middle of a file: resumed, every line is told exactly once."""

import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.batch_run import BatchRun, request
from tests.support.chaos import SCALE, new_seed
from tests.support.wait import wait_until
from tests.support.worker import runs

NUM_LINES = int(1500 * SCALE)
NUM_KILLS = int(12 * SCALE)

pytestmark = pytest.mark.timeout(300 * max(1, SCALE))


def test_kills_of_the_command_and_of_its_engine_lose_no_line_and_repeat_none(tmp_path: Path, fake_model: Path) -> None:
    drawn = random.Random(seed := new_seed())
    batch = BatchRun(tmp_path, fake_model, [request(number, 2 + number % 9) for number in range(NUM_LINES)])
    for _ in range(NUM_KILLS):
        live_and_die(batch, drawn)
    batch.run("--resume", "--max-slots", "32")
    assert batch.times_told() == {f"c{number}": 1 for number in range(NUM_LINES)}, f"seed {seed}"
    verify = [sys.executable, "-m", "worker.cli", "batch", "verify", *batch.files]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0


def live_and_die(batch: BatchRun, drawn: random.Random) -> None:
    """A run that is killed after some lines, half of the time with an engine that was killed before it."""
    with batch.start("--resume", "--max-slots", "4", delay_s=0.003) as process:
        goes_on(batch, process, drawn.randrange(1, NUM_LINES // (3 * NUM_KILLS)))
        engines = process.children()
        if drawn.random() < 0.5:
            for engine in engines:
                engine.kill()
            goes_on(batch, process, 2)
            engines += process.children()
        process.kill()
        process.communicate(timeout=10)
    wait_until(lambda: not any(map(runs, engines)), 10, "the end of the engines with the command")


def goes_on(batch: BatchRun, process: psutil.Popen, num_lines: int) -> None:
    """Wait for so many more lines."""
    target = num_told(batch) + num_lines
    wait_until(lambda: num_told(batch) >= target or process.poll() is not None, 30, f"{target} lines")


def num_told(batch: BatchRun) -> int:
    return batch.out.read_bytes().count(b"\n") if batch.out.exists() else 0
