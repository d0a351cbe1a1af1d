"""The server's configuration of the compose file, on a real server."""

import subprocess
from contextlib import suppress
from pathlib import Path

import redis

from tests.support.wait import wait_until
from worker.connection import connect
from worker.embedded import find_server

CONFIG = Path(__file__).parents[2] / "ops/redis/redis.conf"
SHARED = ("appendonly", "appendfsync", "save", "maxmemory-policy", "client-output-buffer-limit")


def _answers(client: redis.Redis) -> bool:
    with suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


def _configured(folder: Path) -> dict[str, str]:
    """What a server that was started with the file says of itself."""
    socket = folder / "s"
    command = [find_server(), CONFIG, "--port", "0", "--unixsocket", socket, "--dir", folder, "--logfile", folder / "log"]
    with subprocess.Popen(command) as server, connect(f"unix://{socket}") as client:
        try:
            wait_until(lambda: _answers(client), message="the server answers")
            return dict(client.config_get(*SHARED))
        finally:
            server.terminate()


def test_the_configuration_is_accepted_and_neither_loses_nor_evicts_jobs(tmp_path: Path) -> None:
    shown = _configured(tmp_path)
    assert (shown["appendonly"], shown["maxmemory-policy"]) == ("yes", "noeviction")


def test_a_deployment_and_the_embedded_server_are_configured_alike(tmp_path: Path, redis_client: redis.Redis) -> None:
    assert _configured(tmp_path) == redis_client.config_get(*SHARED)
