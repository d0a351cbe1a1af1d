"""Servers that are reached in other ways than by a plain port: TLS, Sentinels, a cluster, a limited user.

All run the binary of tests/support/server.py. Each is an `Endpoint`: the URL under test, and one that may do everything.
"""

import socket
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
import trustme

from tests.support.proxy import Proxy
from tests.support.server import embedded_server, server_binary
from tests.support.wait import wait_until
from worker.connection import connect
from worker.embedded import EmbeddedServer, die_with_parent, free_port

MASTER = "mill"
PASSWORD = "pa55-w0rd"
ACL_FILE = Path(__file__).parents[2] / "ops" / "redis" / "users.acl"


@dataclass(frozen=True)
class Endpoint:
    """`url` is what is under test; `admin_url` reaches the same data, as a user who may do everything."""

    url: str
    admin_url: str


@contextmanager
def tls() -> Iterator[Endpoint]:
    """TLS ends in a proxy in front of the server."""
    with tempfile.TemporaryDirectory() as folder, embedded_server() as server:
        authority = Path(folder) / "ca.pem"
        with tls_in_front_of(server.port, authority) as port:
            yield Endpoint(f"rediss://localhost:{port}/0?ssl_ca_certs={authority}", server.url)


@contextmanager
def tls_in_front_of(target: int, authority: Path) -> Iterator[int]:
    """The port of a TLS proxy called localhost; the certificate of its authority is written to the file."""
    issuer = trustme.CA()
    issuer.cert_pem.write_to_path(str(authority))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    issuer.issue_cert("localhost").configure_cert(context)
    with Proxy(target, tls=context) as proxy:
        yield proxy.port


class Sentinels:
    """A master, a replica of it, and one Sentinel, which decides alone after `patience_s`."""

    def __init__(self, stack: ExitStack, patience_s: float) -> None:
        at_once = {"repl-diskless-sync-delay": "0"}
        self.master = stack.enter_context(embedded_server(options=at_once))
        replica = embedded_server(options=at_once | {"replicaof": f"127.0.0.1 {self.master.port}"})
        self.replica = stack.enter_context(replica)
        for server in (self.replica, self.master):
            stack.callback(server.kill)  # an orderly end waits for the other one
        with connect(self.master.url) as master:
            wait_until(lambda: master.info("replication").get("slave0", {}).get("state") == "online", message="a replica")
        self.port = stack.enter_context(_sentinel(self.master.port, patience_s))
        self.url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self.port}/{MASTER}/0"
        with connect(f"redis://127.0.0.1:{self.port}") as sentinel:
            wait_until(lambda: _num_replicas(sentinel) == 1, message="a Sentinel that knows the replica")


@contextmanager
def sentinels(patience_s: float = 0.5) -> Iterator[Sentinels]:
    """See `Sentinels`."""
    with ExitStack() as stack:
        yield Sentinels(stack, patience_s)


@contextmanager
def sentinel() -> Iterator[Endpoint]:
    """The master of `sentinels`, which stays the master."""
    with sentinels(patience_s=60) as started:
        yield Endpoint(started.url, started.master.url)


def _num_replicas(sentinel: redis.Redis) -> int:
    flat = sentinel.execute_command("SENTINEL MASTER", MASTER)
    return int(flat["num-slaves"])


@contextmanager
def _sentinel(master_port: int, patience_s: float) -> Iterator[int]:
    with tempfile.TemporaryDirectory() as folder:
        port, file = free_port(), Path(folder) / "sentinel.conf"
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"sentinel monitor {MASTER} 127.0.0.1 {master_port} 1",
            f"sentinel down-after-milliseconds {MASTER} {int(patience_s * 1000)}",
            f"sentinel failover-timeout {MASTER} 3000",
        ]
        file.write_text("\n".join(lines) + "\n")
        command = [*die_with_parent(), str(server_binary()), str(file), "--sentinel"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                wait_until(lambda: _accepts(port), message="a Sentinel")
                yield port
            finally:
                process.kill()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def cluster() -> Iterator[Endpoint]:
    """A cluster of one node that owns all slots, seen by the limited user."""
    with _users() as file, cluster_node({"aclfile": file}) as node, connect(node.url) as admin:
        admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in admin.execute_command("CLUSTER", "INFO"), message="a cluster")
        yield Endpoint(f"redis+cluster://slotmill:{PASSWORD}@127.0.0.1:1,127.0.0.1:{node.port}", node.url)


@contextmanager
def cluster_node(options: dict[str, str] | None = None) -> Iterator[EmbeddedServer]:
    """A node without slots."""
    with embedded_server(options={"cluster-enabled": "yes", "cluster-port": str(free_port())} | (options or {})) as node:
        yield node


@contextmanager
def limited_user() -> Iterator[Endpoint]:
    """The user of ops/redis/users.acl."""
    with _users() as file, embedded_server(options={"aclfile": file}) as server:
        yield Endpoint(server.url.replace("redis://", f"redis://slotmill:{PASSWORD}@"), server.url)


@contextmanager
def _users() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "users.acl"
        users = ACL_FILE.read_text().replace("user default off", "user default on nopass ~* &* +@all")  # for the tests' own use
        file.write_text(users.replace("CHANGE-ME ", f"{PASSWORD} "))
        yield str(file)


ENDPOINTS: dict[str, Callable[[], "contextmanager[Endpoint]"]] = {  # type: ignore[type-arg]
    "tls": tls,
    "sentinel": sentinel,
    "cluster": cluster,
    "limited-user": limited_user,
}
