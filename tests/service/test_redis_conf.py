"""The server's configuration of the compose file, on a real server."""

import subprocess
from contextlib import suppress
from pathlib import Path

import redis

from tests.support.wait import wait_until
from worker.embedded import find_server

CONFIG = Path(__file__).parents[2] / "ops/redis/redis.conf"


def _answers(client: redis.Redis) -> bool:
    with suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


def test_the_configuration_is_accepted_and_neither_loses_nor_evicts_jobs(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    command = [find_server(), CONFIG, "--port", "0", "--unixsocket", socket, "--dir", tmp_path, "--logfile", tmp_path / "log"]
    with subprocess.Popen(command) as server, redis.Redis(unix_socket_path=str(socket), decode_responses=True) as client:
        try:
            wait_until(lambda: _answers(client), message="the server answers")
            shown = client.config_get("appendonly", "maxmemory-policy", "client-output-buffer-limit")
        finally:
            server.terminate()
    assert shown["appendonly"] == "yes"
    assert shown["maxmemory-policy"] == "noeviction"
    assert "pubsub 67108864 16777216 30" in shown["client-output-buffer-limit"]
