"""The fake engine, but that a poisonous prompt kills the worker with it; runs as a script."""

import os
import shlex
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs as a script, wherever that is
from tests.support import fake_engine

_kill = os.kill


def command(delay_s: float) -> str:
    """For `--engine-command`."""
    return shlex.join((sys.executable, str(Path(__file__).resolve()), "--delay-s", str(delay_s)))


def _kill_both(pid: int, how: int) -> None:
    _kill(os.getppid(), signal.SIGKILL)
    _kill(pid, how)


if __name__ == "__main__":
    os.kill = _kill_both
    fake_engine.main()
