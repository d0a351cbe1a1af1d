"""What a server's URL means, and how a channel is heard, without a server."""

import socket
import threading
from contextlib import closing
from typing import Any

import pytest
import redis
from redis.connection import SSLConnection

from tests.support.wait import wait_until
from worker.connection import connect, describe, hear, hide_password, subscribe, unavailable
from worker.errors import InvalidOption

SECRET = "s3cret-pa55"


def options(url: str, **more: Any) -> dict[str, Any]:
    with connect(url, "q", **more) as client:
        return dict(client.connection_pool.connection_kwargs)


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "redis+sentinel://h/m", "redis+cluster://h", "rediss+cluster://h"])
def test_a_lost_peer_is_noticed_and_nothing_is_sent_twice(url: str) -> None:
    given = options(url, timeout_s=3.0)
    assert (given["socket_timeout"], given["socket_connect_timeout"], given["retry"]) == (3.0, 3.0, None)
    assert given["socket_keepalive"]
    assert given["socket_keepalive_options"][socket.TCP_KEEPIDLE] == 10


def test_a_url_may_set_timeouts_of_its_own() -> None:
    assert options("redis+cluster://h?socket_timeout=7", timeout_s=3.0)["socket_timeout"] == 7.0


@pytest.mark.parametrize(
    ("url", "where"),
    [
        (f"redis://u:{SECRET}@h:7/1", "h:7"),
        ("redis://", "localhost:6379"),
        (f"unix:///run/s?password={SECRET}", "/run/s"),
        (f"redis+sentinel://u:{SECRET}@a,b:7/m/1?sentinel_password={SECRET}", "sentinel a:26379,b:7"),
        (f"rediss+cluster://u:{SECRET}@[::1]:7,b", "cluster ::1:7,b:6379"),
    ],
)
def test_a_server_is_described_without_its_password(url: str, where: str) -> None:
    with connect(url, "q") as client:
        assert describe(client) == where
        assert SECRET not in repr(client)


@pytest.mark.parametrize("kind", ["sentinel://u:{}@h:1/m", "cluster://u:{}@h:1"])
def test_tls_goes_to_those_who_are_asked_too(kind: str) -> None:
    given = options("rediss+" + kind.format(SECRET))
    assert isinstance(given["find"]._make("h", 1), SSLConnection)


def test_sentinels_have_a_password_of_their_own_and_nodes_have_the_servers() -> None:
    sentinels = options(f"redis+sentinel://u:{SECRET}@h/m?sentinel_username=s&sentinel_password=t")
    asked = sentinels["find"]._make("h", 1)
    assert (sentinels["username"], sentinels["password"]) == ("u", SECRET)
    assert (asked.username, asked.password) == ("s", "t")
    node = options(f"redis+cluster://u:{SECRET}@h")["find"]._make("h", 1)
    assert (node.username, node.password) == ("u", SECRET)
    assert options("redis+sentinel://u:p@h/m")["find"]._make("h", 1).password is None


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://u:{}@h",
        "redis+sentinel://u:{}@h/m/x",
        "redis+sentinel://u:{}@h:port/m",
        "redis+sentinel://u:{}@a,b:99999/m",
        "redis+sentinel://u:{}@h/m?x=1",
        "redis+sentinel://u:{}@h/m?socket_timeout=0",
        "redis+cluster://u:{}@h/1",
        "redis+cluster://u:{}@h?db=1",
        "redis+cluster://u:{}@h?sentinel_password=1",
        "redis+cluster://",
        "unix+cluster://u:{}@h",
        "redis+other://u:{}@h",
        "redis://u:{}@h?sentinel_password=1",
        "redis://u:{}@a,b",
        "rediss://u:{}@h?ssl_cert_reqs=never",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_secrets(url: str) -> None:
    with pytest.raises(InvalidOption, match=r"write redis://host:6379/0, .*redis\+sentinel://.*redis\+cluster://") as refused:
        connect(url.format(SECRET), "q")
    assert SECRET not in str(refused.value)


def test_a_cluster_needs_the_queue() -> None:
    with pytest.raises(InvalidOption, match="a cluster is reached for one queue"):
        connect("redis+cluster://a")


def test_the_node_that_answered_is_asked_first_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    find = options("redis+sentinel://a,b,c/m")["find"]
    asked: list[str] = []

    def ask(node: tuple[str, int], *command: str) -> list[bytes]:
        asked.append(node[0])
        if node[0] == "a":
            raise redis.ConnectionError("refused")
        return [b"10.0.0.1", b"7"]

    monkeypatch.setattr(find, "_ask", ask)
    assert [find(), find()] == [("10.0.0.1", 7)] * 2
    assert asked == ["a", "b", "b"]


def test_a_node_that_does_not_know_its_own_name_is_meant_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    find = options("redis+cluster://a:7")["find"]
    monkeypatch.setattr(find, "_ask", lambda *_: [[0, 16383, [None, 9, b"id"]]])
    assert find() == ("a", 9)


def test_a_slot_that_nobody_owns_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    find = options("redis+cluster://a:7")["find"]
    monkeypatch.setattr(find, "_ask", lambda *_: [[0, 1, [b"b", 9, b"id"]]])
    with pytest.raises(redis.ConnectionError, match=r"none of them knows where slotmill:\{q\}: is"):
        find()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("rediss://user:secret@host/0?ssl_cert_reqs=none", "rediss://user:***@host/0?ssl_cert_reqs=none"),
        ("redis://:se@cret@host/0", "redis://:***@host/0"),
        ("unix:///run/redis.sock?db=1&password=secret", "unix:///run/redis.sock?db=1&password=***"),
        ("redis://h?p%61ssword=secret&db=1", "redis://h?p%61ssword=***&db=1"),
        ("rediss://h?ssl_password=secret&ssl_keyfile=/k", "rediss://h?ssl_password=***&ssl_keyfile=/k"),
        ("redis+cluster://u:secret@a:1,b:2?db=0", "redis+cluster://u:***@a:1,b:2?db=0"),
        (
            "rediss+sentinel://u:secret@a:1,b/m/1?sentinel_username=s&sentinel_password=secret",
            "rediss+sentinel://u:***@a:1,b/m/1?sentinel_username=s&sentinel_password=***",
        ),
        ("redis://h:1/0?password=se@cret", "redis://***"),
        ("redis://u:secret?x@h/0", "redis://***"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (redis.ConnectionError("Connection refused."), "start one with `worker redis`"),
        (redis.TimeoutError("Timeout reading from socket"), "see whether it answers a PING on its own host"),
    ],
    ids=["nothing listens", "it stands still"],
)
def test_a_server_that_stands_still_is_not_one_to_be_started(error: redis.RedisError, remedy: str) -> None:
    with connect("redis://h") as client:
        assert remedy in str(unavailable(client, error))


def test_a_message_that_has_come_by_half_is_heard_whole() -> None:
    message = b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$4\r\nword\r\n"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        connect(f"redis://127.0.0.1:{server.getsockname()[1]}") as client,
        closing(subscribe(client, "c")) as subscription,
        server.accept()[0] as peer,
    ):
        peer.sendall(b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n")
        assert hear(subscription, 5.0) == ("subscribe", 1)
        peer.sendall(message[:20])
        wait_until(lambda: subscription.connection.can_read(0.0), message="half a message")
        rest = threading.Timer(0.2, peer.sendall, [message[20:]])
        rest.start()
        assert hear(subscription, 0.0) == ("message", b"word")
        rest.join()
        assert hear(subscription, 0.0) is None
