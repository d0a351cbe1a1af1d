"""The engine process: `python -m engine.serve --fd N`.

Speaks `engine.messages` over a connection on an inherited file descriptor. The first message it receives is the `EngineConfig`.
It leaves when told to, and when the other end is gone, whatever the reason; signals are the queue side's business, so that a
drain is not cut short when a terminal or an init system signals the whole process group.
"""

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import EngineError, RequestRefused, one_line
from engine.messages import Abort, EngineFailed, EngineLoading, EngineReady, RequestRejected, RunsAlone, Shutdown
from engine.ranks import Ranks
from engine.request import Request

if TYPE_CHECKING:
    from engine.core import Engine
    from engine.model_runner import ModelRunner


def main() -> int:
    """Load, report, serve. Exit code 1 when the engine cannot start."""
    parser = argparse.ArgumentParser(description="slotmill engine process; started by the worker")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the queue side")
    conn = inherited(parser.parse_args().fd)
    _wait_briefly()
    try:
        return _load_and_serve(conn)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the queue side is gone: nobody is left to serve or to tell


class Pipe(Connection):
    """A connection that more than one thread may send on."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send it whole."""
        with self._lock:
            super().send(message)


def inherited(fd: int) -> Pipe:
    """The pipe to the process that started this one. From now on signals are ignored, and this process ends with that one."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    _die_with_parent()
    os.set_inheritable(fd, False)  # a child of ours must not keep the pipe open when we die
    return Pipe(fd)


def _wait_briefly() -> None:
    """Let OpenMP's threads spin for a fraction of a millisecond before they sleep; read when torch loads.

    Asleep at once, a step of 16 sequences took 205 to 226 ms, spinning so long 126 to 159 ms, for ever 155 ms (SmolLM2-135M in
    fp32, two cores of an AMD EPYC, 2026-11-30), and spinning for ever starves the queue side and the server beside it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "100000")


def _die_with_parent() -> None:
    """Linux kills this process when the thread that started it dies: an end of file is not seen while a model loads."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _load_and_serve(conn: Connection) -> int:
    config: EngineConfig = conn.recv()
    conn.send(EngineLoading("importing torch"))
    gc.disable()  # nothing that is imported or loaded goes away: looking for it takes a sixth of the time
    started = time.perf_counter()
    ranks = Ranks(config.tensor_parallel, lambda reason: _give_up(conn, reason)) if config.tensor_parallel > 1 else None
    try:
        from engine.core import Engine

        conn.send(EngineLoading(f"loading {config.model}"))
        with _telling(conn):
            runner = _runner(config, ranks)
    except EngineError as error:
        conn.send(EngineFailed(str(error)))
        return 1
    conn.send(ready_message(runner, time.perf_counter() - started))
    gc.collect()
    gc.enable()
    gc.freeze()  # what was loaded lives as long as the process: later collections need not look at it
    try:
        serve(Engine(runner), conn)
    finally:
        runner.close()
    return 0


@contextlib.contextmanager
def _telling(conn: Connection) -> Iterator[None]:
    """What our packages log meanwhile, of what takes long, is a phase of loading."""
    handler, loggers = logging.Handler(logging.INFO), [logging.getLogger(name) for name in ("engine", "kernels")]
    handler.emit = lambda record: conn.send(EngineLoading(record.getMessage()))  # type: ignore[method-assign]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)


def _runner(config: EngineConfig, ranks: Ranks | None) -> "ModelRunner":
    """The model in this process alone, or shared with others."""
    if ranks is None:
        from engine.model_runner import ModelRunner

        return ModelRunner(config)
    from engine.parallel import TensorParallelRunner

    return TensorParallelRunner(config, ranks)


def _give_up(conn: Connection, reason: str) -> None:
    """End this process, whose main thread may wait in a library for ever."""
    with contextlib.suppress(OSError):
        conn.send(EngineFailed(reason))
    os._exit(1)


def serve(engine: "Engine", conn: Connection) -> None:
    """Take requests, step while there is work, wait without spinning while there is none. Returns after `Shutdown`.

    An engine that raises cannot go on: the other end is told why, and the process ends with code 1.
    """
    engine.on_alone = lambda request_id: conn.send(RunsAlone(request_id))
    try:
        _serve(engine, conn)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001  whatever it was, who waits for it is told
        place = traceback.extract_tb(error.__traceback__)[-1]
        # In one piece, as the queue side writes lines there too, and first, as it may end this process once it is told.
        os.write(sys.stderr.fileno(), traceback.format_exc().encode())
        conn.send(EngineFailed(f"a step failed at {Path(place.filename).name}:{place.lineno}: {one_line(error)}"))
        raise SystemExit(1) from None


def _serve(engine: "Engine", conn: Connection) -> None:
    while True:
        stale = False
        while conn.poll(None if not engine.has_work and not stale else 0):
            message = conn.recv()
            if isinstance(message, Shutdown):
                return
            stale |= _handle(engine, conn, message)
        if engine.has_work:
            conn.send(engine.step())
        elif stale:
            conn.send(engine.idle_report())


def _handle(engine: "Engine", conn: Connection, message: object) -> bool:
    """Act on one message; whether the last report no longer tells the truth."""
    match message:
        case Request():
            try:
                engine.add_request(message)
            except RequestRefused as refusal:
                conn.send(RequestRejected.of(message.request_id, refusal))
            return False
        case Abort(request_id, choice):
            engine.abort(request_id, choice)
            return True
        case _:
            raise AssertionError(f"unknown message {type(message).__name__}")


def ready_message(runner: "ModelRunner", load_s: float) -> EngineReady:
    """What an engine with this runner says of itself."""
    limits, geometry = runner.scheduler_config, runner.geometry
    return EngineReady(
        model_dir=str(runner.tokenizer_dir),
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        eos_token_ids=tuple(geometry.eos_token_ids),
        max_model_len=limits.max_sequence_tokens,
        max_slots=limits.max_slots,
        token_budget=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        load_s=load_s,
        memory_rows=runner.memory_rows(),
        block_bytes=runner.kv_bytes_per_token * limits.block_size,
        memory=runner.memory_counts(),
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what is frozen stays to the end, and some libraries would complain of leaks
