"""The HTTP port: whatever somebody sends, or does not send, others are answered."""

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from worker.health import MAX_CLIENTS, HealthServer, Probes
from worker.metrics import Metrics


@pytest.fixture
def server() -> Iterator[HealthServer]:
    server = HealthServer("127.0.0.1", 0, Probes(Metrics().registry, lambda: "", lambda: "loading"))
    server.start()
    yield server
    server.stop()


def get(server: HealthServer, path: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=5) as reply:
        return reply.read().decode()


@pytest.mark.parametrize("version", ["abc", "=1.0.0", '"1.0.0"', "-1", ""])
@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
def test_a_scraper_that_asks_for_an_odd_version_is_answered(server: HealthServer, kind: str, version: str) -> None:
    assert "slotmill_slots 0.0" in get(server, "/metrics", Accept=f"{kind};version={version}")


def test_clients_that_ask_nothing_keep_nobody_from_a_probe_and_are_let_go(server: HealthServer) -> None:
    address = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        mute = [stack.enter_context(socket.create_connection((address[0], int(address[1])), 5)) for _ in range(2 * MAX_CLIENTS)]
        assert get(server, "/livez") == "ok\n"
        mute[0].settimeout(5)
        assert mute[0].recv(1) == b""  # who came first is let go first
        mute[-1].sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        mute[-1].settimeout(5)
        assert mute[-1].recv(4096).startswith(b"HTTP/1.0 200 ")
