"""The fake engine, but that it hangs half-way through its first report, and with it who reads that; runs as a script."""

import os
import shlex
import struct
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs as a script, wherever that is
from engine.messages import StepReport
from engine.serve import Pipe
from tests.support import fake_engine

COMMAND = shlex.join((sys.executable, str(Path(__file__).resolve())))
"""For `--engine-command`."""


def _send(conn: Pipe, message: object) -> None:
    if isinstance(message, StepReport):
        os.write(conn.fileno(), struct.pack("!i", 1000))  # so many bytes are to follow
        time.sleep(3600)
    Connection.send(conn, message)


if __name__ == "__main__":
    Pipe.send = _send
    fake_engine.main()
