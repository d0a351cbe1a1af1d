"""The engine process as the queue side sees it: started, spoken to, watched, started again.

Relies on `engine.messages` for the words and on a socket pair for the pipe, so that the death of either side is an end of file
at the other, whatever the cause. Leaves what the messages mean to the `Handler`.

1. Only the reader thread receives, and it never waits for anything but the pipe: an engine that reports is never held up.
2. Nobody sends but the sender thread. An engine in a long step does not read, and a pipe that is full then must not stop the
   reader, or the two processes would wait for each other.
3. Where the log is JSON a thread reads the engine's stderr and does nothing else; what it drops it has read before, so that an
   engine that says much is not held up either.
"""

import contextlib
import os
import queue
import random
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from engine.config import EngineConfig
from engine.messages import Abort, EngineFailed, EngineLoading, EngineReady, RequestRejected, RunsAlone, Shutdown, StepReport
from engine.request import Request
from worker import log
from worker.errors import EngineUnavailable

MAX_FAILED_STARTS = 3
"""Starts in a row that end before the engine is ready, after which the worker gives up: its own supervisor takes over."""
MAX_BACKOFF_S = 30.0
LONG_LIFE_S = 60.0
STOP_GRACE_S = 3.0
SAID_CHARS = 4000
"""The end of what an engine says on stderr at a time; a line of the log."""
PAUSE_S = 0.05
"""An engine that has been silent for so long has said one thing, such as a traceback; after `LONGEST_SPEECH_S` it is cut."""
LONGEST_SPEECH_S = 1.0

ToEngine = EngineConfig | Request | Abort | Shutdown
FromEngine = EngineLoading | EngineReady | EngineFailed | StepReport | RequestRejected | RunsAlone

_log = log.get("bridge")


class EngineProcess:
    """One engine process and the connection to it."""

    def __init__(self, config: EngineConfig, command: Sequence[str]) -> None:
        """Start `command --fd N` and send it `config`. `EngineUnavailable` when it cannot be executed."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, "--fd", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE if log.is_ours_alone() else None,
                    start_new_session=True,  # Ctrl-C in a terminal is the worker's to handle
                )
            except OSError as error:
                ours.close()
                raise EngineUnavailable(f"cannot start the engine ({command[0]}): {error.strerror}") from error
        self._conn = Connection(ours.detach())
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="engine-sender", daemon=True)
        self._sender.start()
        self._listener = threading.Thread(target=self._listen, args=(config.device,), name="engine-listener", daemon=True)
        self._listener.start()
        self.send(config)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Hand a message to the sender thread; never blocks. What is sent to a dead engine is lost, as its work is."""
        self._outbox.put(message)

    def receive(self, timeout_s: float) -> FromEngine | None:
        """The next message, or None after `timeout_s`. `EngineUnavailable` when the process is gone."""
        try:
            if self._conn.poll(timeout_s):
                message: FromEngine = self._conn.recv()
                return message
        except (EOFError, OSError) as error:
            raise EngineUnavailable(f"the engine process {self._how_it_ended()}") from error
        if self._process.poll() is not None and not self._conn.poll(0):  # a grandchild may hold the pipe open
            raise EngineUnavailable(f"the engine process {self._how_it_ended()}")
        return None

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask it to leave, wait a little, kill it. Safe to call twice and after its death."""
        self.send(Shutdown())
        self._outbox.put(None)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._sender.join(STOP_GRACE_S)
        self._listener.join(1.0)  # a grandchild may hold the pipe for longer
        self._conn.close()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader is the one that tells of a dead engine
            while (message := self._outbox.get()) is not None:
                self._conn.send(message)

    def _listen(self, device: str) -> None:
        """Log what the engine, or a library in it, writes on stderr."""
        if self._process.stderr is None:
            return
        with self._process.stderr as pipe:
            for said in _speeches(pipe.fileno()):
                lines = [line.rpartition("\r")[2] for line in said.decode(errors="replace").rstrip().split("\n")]
                _log.warning("engine_said", device=device, pid=self.pid, text="\n".join(lines)[-SAID_CHARS:])

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _speeches(fd: int) -> Iterator[bytes]:
    """What comes out of a pipe, parted at pauses; of each no more than the end."""
    while said := os.read(fd, 65536):
        until = time.monotonic() + LONGEST_SPEECH_S
        while time.monotonic() < until and select.select([fd], [], [], PAUSE_S)[0] and (more := os.read(fd, 65536)):
            said = (said + more)[-4 * SAID_CHARS :]
        if said.strip():
            yield said


class Handler(Protocol):
    """Who acts on what the engine says. Called on the reader thread; must not block."""

    def on_loading(self, phase: str) -> None:
        """The engine is busy becoming ready."""

    def on_ready(self, ready: EngineReady) -> None:
        """The engine serves from now on. `EngineUnavailable` when its model cannot be served here."""

    def on_report(self, report: StepReport) -> None:
        """One step is done."""

    def on_rejected(self, rejection: RequestRejected) -> None:
        """A request can never be served."""

    def on_alone(self, request_id: str) -> None:
        """The time that a suspect is computed alone begins."""

    def on_down(self) -> bool:
        """The engine is gone, and what was in it. Whether it is known which request did it."""

    def stalled_for_s(self) -> float:
        """Seconds without a step of an engine that has work."""


class EngineSupervisor:
    """Keeps one engine process running: a thread that starts it, reads from it, and starts it again with a backoff."""

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str],
        handler: Handler,
        may_give_up: Callable[[], bool] = lambda: True,
        stall_s: float = float("inf"),
    ) -> None:
        """After too many failed starts it gives up when it `may_give_up`: not while other engines of the worker serve.

        An engine that has work and makes no step for `stall_s` is killed.
        """
        self._config = config
        self._stall_s = stall_s
        self._may_give_up = may_give_up
        self._command = command
        self._handler = handler
        self._process: EngineProcess | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-reader", daemon=True)
        self._failed_starts = 0
        self._deaths = 0
        self._ready_at = 0.0
        self._has_served = False
        self.is_ready = False
        self.failure: str | None = None
        """Why there will be no engine any more; the worker leaves with exit code 6."""

    @property
    def pid(self) -> int | None:
        """Process id of the engine that runs now."""
        return self._process.pid if self._process else None

    @property
    def has_died(self) -> bool:
        """Whether the reader thread has ended with neither an order nor a failure to show for it."""
        is_over = self._thread.ident is not None and not self._thread.is_alive()
        return is_over and not self._stop.is_set() and self.failure is None

    def start(self) -> None:
        """Start the reader thread, which starts the engine."""
        self._thread.start()

    def send(self, message: Request | Abort) -> None:
        """Hand a message to the engine that runs now; without one it is dropped, and `on_down` has told why."""
        if process := self._process:
            process.send(message)

    def leave(self) -> None:
        """Begin to stop."""
        self._stop.set()

    def stop(self) -> None:
        """Stop the engine and the thread."""
        self.leave()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set() and self.failure is None:
            try:
                self._process = EngineProcess(self._config, self._command)
                self._serve(self._process)
            except EngineUnavailable as error:
                self._note_death(str(error))
            except Exception:  # noqa: BLE001  a fault of ours while reading: start over with a clean engine
                _log.error("reader_failed", exc_info=True)
                self._note_death("the queue side failed to read its report")
            finally:
                # One that loads does not listen and holds nothing; one that is not asked to leave is dead or hangs.
                grace_s = STOP_GRACE_S if self.is_ready and self._stop.is_set() else 0.0
                self.is_ready = False
                if process := self._process:
                    self._process = None
                    process.stop(grace_s)
            if not self._stop.is_set():
                self._deaths -= self._handler.on_down()
                self._stop.wait(self._backoff_s())

    def _serve(self, process: EngineProcess) -> None:
        while not self._stop.is_set():
            match process.receive(0.5):
                case StepReport() as report:
                    self._handler.on_report(report)
                case RequestRejected() as rejection:
                    self._handler.on_rejected(rejection)
                case RunsAlone(request_id):
                    self._handler.on_alone(request_id)
                case EngineLoading(phase):
                    self._handler.on_loading(phase)
                case EngineReady() as ready:
                    self._accept(ready)
                    self._failed_starts, self._has_served, self.is_ready = 0, True, True
                    self._ready_at = time.monotonic()
                case EngineFailed(message):
                    raise self._no_start(message)
                case None if (silent_s := self._handler.stalled_for_s()) > self._stall_s:
                    raise EngineUnavailable(f"the engine process made no step for {silent_s:.0f} s with work to do; killed")

    def _accept(self, ready: EngineReady) -> None:
        try:
            self._handler.on_ready(ready)
        except EngineUnavailable as error:
            raise self._no_start(str(error)) from error

    def _no_start(self, reason: str) -> EngineUnavailable:
        """What an engine says of itself, at the very first start, does not mend itself: a wrong model, too little memory."""
        if not self._has_served:
            self.failure = reason
        return EngineUnavailable(reason)

    def _note_death(self, reason: str) -> None:
        """Log it; give up after too many starts that came to nothing."""
        self._failed_starts += not self.is_ready
        lived_long = self.is_ready and time.monotonic() - self._ready_at > LONG_LIFE_S
        self._deaths = 1 if lived_long else self._deaths + 1
        if self._failed_starts >= MAX_FAILED_STARTS and self._may_give_up():
            self.failure = self.failure or reason
        _log.error(
            "engine_down",
            device=self._config.device,
            reason=reason,
            failed_starts=self._failed_starts,
            gives_up=self.failure is not None,
        )

    def _backoff_s(self) -> float:
        """Nothing after a first death, then 1, 2, 4 ... seconds with jitter until an engine lives long again.

        Deaths that a request is charged with do not count: those who did nothing would wait for them.
        """
        if self.failure is not None or self._deaths < 2:
            return 0.0
        return min(MAX_BACKOFF_S, 2.0 ** (self._deaths - 2)) * random.uniform(0.5, 1.0)
