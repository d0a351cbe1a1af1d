"""Answers probes and scrapes over HTTP, from a thread that no job, engine or server can hold up.

    /metrics   the registry in Prometheus' text format, or as OpenMetrics, compressed, where the scraper asks for it
    /livez     200 while the worker makes progress; else a restart is the remedy
    /readyz    200 while it can take jobs: engine ready, server answering, not draining
    /healthz   both, and why not, as JSON

Relies on prometheus_client for what a scrape gets. Leaves what is healthy to `Probes`.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

from worker.errors import InvalidOption

TEXT = "text/plain; version=0.0.4; charset=utf-8"
IO_TIMEOUT_S = 10
MAX_CLIENTS = 64
"""Beyond that who came first is let go: whoever asks slowly, or nothing, keeps neither probes nor file descriptors."""


@dataclass(frozen=True, slots=True)
class Probes:
    """What the endpoints show. A probe answers why it fails, or an empty string."""

    registry: CollectorRegistry
    not_live: Callable[[], str]
    not_ready: Callable[[], str]


class HealthServer:
    """The HTTP thread."""

    def __init__(self, host: str, port: int, probes: Probes) -> None:
        """Bind at once; 0 takes a free port. `InvalidOption` when that is not possible."""
        try:
            self._server = _Server((host, port), probes)
        except OSError as error:
            why = error.strerror or str(error)
            where = f"--metrics-host {host}, --metrics-port {port}"
            raise InvalidOption(f"{where}: cannot listen there: {why}; take another port or 0, and an own address") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        name = host.decode() if isinstance(host, bytes) else host
        return f"http://{f'[{name}]' if ':' in name else name}:{port}"

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and close the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a client that finds the queue full tries again after a second, which is longer than probes wait

    def __init__(self, address: tuple[str, int], probes: Probes) -> None:
        self.probes = probes
        self._clients: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._clients[request] = None
            oldest = next(iter(self._clients)) if len(self._clients) > MAX_CLIENTS else None
            if oldest:
                del self._clients[oldest]
        if oldest:
            with contextlib.suppress(OSError):  # it has just left
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Handler(MetricsHandler):
    server: _Server
    server_version = "slotmill"
    sys_version = ""
    timeout = IO_TIMEOUT_S

    def do_GET(self) -> None:  # noqa: N802  the base class names it so
        probes = self.server.probes
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer_scrape(probes.registry)
            case "/livez":
                self._answer_probe(probes.not_live())
            case "/readyz":
                self._answer_probe(probes.not_ready())
            case "/healthz":
                live, ready = probes.not_live(), probes.not_ready()
                body = {"live": not live, "ready": not ready, "why": live or ready}
                self._answer(503 if live or ready else 200, json.dumps(body).encode(), "application/json")
            case _:
                self._answer(404, b"known are /metrics, /livez, /readyz and /healthz\n", TEXT)

    def _answer_scrape(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        try:
            super().do_GET()
        except (TypeError, ValueError):  # prometheus_client reads no version but numbers with dots; nothing is sent yet
            del self.headers["Accept"]
            super().do_GET()

    def _answer_probe(self, why_not: str) -> None:
        self._answer(503 if why_not else 200, f"{why_not or 'ok'}\n".encode(), TEXT)

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
