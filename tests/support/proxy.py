"""A TCP proxy that makes trouble: slow, silent, gone, or without a reply though the server did what it was asked."""

import contextlib
import queue
import select
import socket
import ssl
import threading
import time
from types import TracebackType
from typing import Self

CHUNK = 65536


class Proxy:
    """Forwards a port of its own to `target` on 127.0.0.1; a context manager. With `tls` it ends TLS.

    `delay_s` holds back what goes either way. `accepted_at` are the times (`time.monotonic`) of its connections.
    """

    def __init__(self, target: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.target = target
        self.delay_s = 0.0
        self.accepted_at: list[float] = []
        self.dropped = threading.Event()
        """Set once a reply was dropped."""
        self._tls = tls
        self._flows = threading.Event()
        self._flows.set()
        self._drop: tuple[bytes, bytes] | None = None
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self.port = 0

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.refuse()
        self._flows.set()
        for thread in self._threads:
            thread.join(10)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def num_open(self) -> int:
        return len(self._links)

    def accept(self) -> None:
        """Take connections, after `refuse` at the same port again."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._listen, listener)

    def refuse(self) -> None:
        """Cut all, and refuse whoever comes, as a server that is down."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection."""
        for link in list(self._links):
            link.close()

    def silence(self) -> None:
        """From now on take connections and data, and say nothing: half-open."""
        self._flows.clear()

    def speak(self) -> None:
        """Go on where it fell silent: what was held back arrives now, even from callers who have given up."""
        self._flows.set()

    def drop_reply(self, request: bytes, holding: bytes = b"") -> None:
        """Let the server do the next thing whose words hold `request` (and whose reply holds `holding`), and cut the connection
        in place of the reply.
        """
        self.dropped.clear()
        self._drop = (request, holding)

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.accepted_at.append(time.monotonic())
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(client, server)
        self._links.add(link)
        self._start(self._pump, link, server, client)
        self._pump(link, client, server)

    def _pump(self, link: "_Link", source: socket.socket, sink: socket.socket) -> None:
        """Read here, write there; a thread of its own writes, so that a delay does not slow the flow down."""
        held: queue.SimpleQueue[tuple[float, bytes] | None] = queue.SimpleQueue()
        self._start(self._write, link, held, sink)
        with contextlib.suppress(OSError, ValueError):
            while data := link.receive(source):
                held.put((time.monotonic() + self.delay_s, data))
                if sink is link.server:
                    link.asked = data
        held.put(None)

    def _write(self, link: "_Link", held: "queue.SimpleQueue[tuple[float, bytes] | None]", sink: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while item := held.get():
                time.sleep(max(0.0, item[0] - time.monotonic()))
                self._flows.wait()
                if sink is link.client and self._is_dropped(link.asked, item[1]):
                    break
                link.send(sink, item[1])
        link.close()
        self._links.discard(link)

    def _is_dropped(self, asked: bytes, reply: bytes) -> bool:
        with self._lock:
            if self._drop is None or self._drop[0] not in asked or self._drop[1] not in reply:
                return False
            self._drop = None
        self.dropped.set()
        return True

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


class _Link:
    """A client's connection and ours to the server; `asked` is what the client said last."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.asked = b""
        self._lock = threading.Lock()

    def receive(self, end: socket.socket) -> bytes:
        """A TLS socket is not for two threads at once: it is waited for without the lock, and read with it."""
        if not isinstance(end, ssl.SSLSocket):
            return end.recv(CHUNK)
        if not end.pending():
            select.select([end], [], [])
        with self._lock:
            return end.recv(CHUNK)

    def send(self, end: socket.socket, data: bytes) -> None:
        with self._lock if isinstance(end, ssl.SSLSocket) else contextlib.nullcontext():
            end.sendall(data)

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
