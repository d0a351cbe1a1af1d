"""An OpenTelemetry collector that keeps what it is sent: OTLP over HTTP on a port of its own."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from tests.support.wait import wait_until
from worker.embedded import free_port


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    is_error: bool

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Collector:
    """What came in, as spans; `paths` are those that were posted to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.paths: set[str] = set()

    def jobs(self) -> list[Span]:
        return [span for span in self.spans if span.name == "job"]

    def wait_for_job(self, job_id: str, count: int = 1) -> list[Span]:
        """The spans of so many attempts at a job, in order."""

        def found() -> list[Span]:
            return [span for span in self.jobs() if span.attributes["messaging.message.id"] == job_id]

        wait_until(lambda: len(found()) >= count, message=f"{count} spans of {job_id}")
        return sorted(found(), key=lambda span: span.start_s)

    def inside(self, job: Span) -> list[Span]:
        return sorted([span for span in self.spans if span.parent_id == job.span_id], key=lambda span: span.start_s)

    def take(self, data: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(data).resource_spans:
            resource = _plain(group.resource.attributes)
            self.spans += [_span(span, resource) for scope in group.scope_spans for span in scope.spans]


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.paths.add(self.path)
            kept.take(self.rfile.read(int(self.headers["Content-Length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield kept
        finally:
            server.shutdown()
            thread.join()


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_plain(span.attributes),
        resource=resource,
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@dataclass(frozen=True)
class BadCollector:
    """`hung_up` is set when a worker has closed a connection that it was answered on without an end."""

    url: str
    hung_up: threading.Event


@contextmanager
def bad_collector(kind: str) -> Iterator["BadCollector"]:
    """One that `refuses` connections, is `silent`, answers with `error` 503, `endless`ly, or `redirects`."""
    if kind == "refuses":
        yield BadCollector(f"http://127.0.0.1:{free_port()}", threading.Event())
        return
    hung_up = threading.Event()
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                held.append(listener.accept()[0])
                threading.Thread(target=answer, args=(held[-1],)).start()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.recv(65536)
            if kind == "error":
                connection.sendall(b"HTTP/1.1 503 Unavailable\r\nRetry-After: 3600\r\nContent-Length: 0\r\n\r\n")
            if kind == "redirects":
                connection.sendall(b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
            while kind == "endless":
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 65536)
        hung_up.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield BadCollector(f"http://127.0.0.1:{listener.getsockname()[1]}", hung_up)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()
