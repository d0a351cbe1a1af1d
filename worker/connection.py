"""How the server is reached: what a URL means and how it is shown, what a lost server costs at most and what people are told
then, how a channel is heard.

    redis://  rediss://  unix://                       one server, by TCP, TLS or a socket
    redis+sentinel://a:26379,b:26379/<name>[/<db>]     whichever server the Sentinels call the master of that name
    redis+cluster://a:6379,b:6379                      whichever node owns the queue: its keys share one slot
    rediss+sentinel://  rediss+cluster://              the same by TLS

Who is the master, or the owner, is asked at each connect, of the first node that answers; a server that says it is not any more
loses its connection. So a failover is a lost connection to all others. Relies on redis-py without its retries: whoever calls
knows what may be sent again. Leaves reconnecting to the callers.
"""

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import redis
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ClusterError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    ResponseError,
)

from worker.errors import InvalidOption, ServerUnavailable
from worker.keys import Keys

DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379/0"
MAX_TIMEOUT_S: Final = 86_400.0
URL_ARGUMENTS: Final = (
    "db",
    "username",
    "password",
    "client_name",
    "socket_timeout",
    "socket_connect_timeout",
    "socket_keepalive",
    "health_check_interval",
    "max_connections",
)
SENTINEL_ARGUMENTS: Final = ("sentinel_username", "sentinel_password")
SENTINEL_PORT: Final = 26379
KEEPALIVE_S: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A peer that is gone without a word is noticed within 25 s even where nothing is sent."""
FORMS: Final = (
    "redis://host:6379/0, rediss://..., unix:///path, redis+sentinel://host:26379/master or redis+cluster://host:6379"
)
REST_S: Final = 5.0
"""What has begun to arrive on a channel is waited for so long."""
MOVED: Final = "the queue has moved to another node"
NOT_NOW: Final = "does not serve this now"

_SEVERAL: Final = re.compile(
    r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://(?P<user>(?:[^/?#]*@)?)(?P<nodes>[^/?#@]+)(?P<path>[^?#]*)(?P<query>(?:\?[^#]*)?)"
)
_IN_AUTHORITY: Final = re.compile(r"(//[^/@:]*:).*@")
_IN_QUERY: Final = re.compile(r"([?&][^=&]*(?:pass|%)[^=&]*=)[^&]*", re.IGNORECASE)
_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

Address = tuple[str, int]
Options = Mapping[str, Any]


def connect(url: str, queue: str | None = None, *, timeout_s: float = 5.0) -> redis.Redis:
    """A client with bytes replies, explicit timeouts in seconds and no retries of its own; does not connect yet.

    A cluster's client is for one `queue`; other servers do not need it. `InvalidOption` for a URL that cannot be read; it may
    hold a password, so it is not shown.
    """
    try:
        options = _options(url, queue, timeout_s)
        pool = redis.ConnectionPool(**options)
        pool.connection_class(**pool.connection_kwargs)  # only a connection knows which of the URL's arguments there are
    except (ValueError, TypeError, redis.RedisError):
        raise InvalidOption(f"redis URL: cannot be read; write {FORMS}") from None
    for name in _FILES:
        if name in options and not Path(options[name]).is_file():
            raise InvalidOption(f"redis URL: {name}: there is no file {options[name]}; name one in PEM format")
    return redis.Redis.from_pool(pool)


def is_cluster(client: redis.Redis) -> bool:
    """Whether channels are sharded as keys are, so that SPUBLISH and SSUBSCRIBE stay within the queue's node."""
    finder = client.connection_pool.connection_kwargs.get("find")
    return isinstance(finder, _Finder) and finder.kind == "cluster"


def hide_password(url: str) -> str:
    """A server's URL fit for logs and messages; its scheme alone where an `@` among its arguments leaves open what is what."""
    if "@" in url.partition("?")[2]:
        return f"{url.partition('://')[0]}://***"
    return _IN_QUERY.sub(r"\1***", _IN_AUTHORITY.sub(r"\1***@", url))


def describe(client: redis.Redis) -> str:
    """Where a client connects to, for people; never with a password."""
    kwargs = client.connection_pool.connection_kwargs
    if "find" in kwargs:
        return str(kwargs["find"])
    return str(kwargs.get("path") or f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}")


def unavailable(client: Any, error: redis.RedisError) -> ServerUnavailable:
    """What to tell people: where it is (never the URL, which may hold a password), the reason, the remedy."""
    reason = next(iter(str(error).splitlines()), "")[:200].rstrip(" .:;") or "does not answer"
    return ServerUnavailable(f"redis server {describe(client)}: {reason}; {_remedy(error)}")


def subscribe(client: Any, channel: str) -> redis.client.PubSub:
    """A subscription on a connection of its own, not confirmed yet; the caller's to close."""
    subscription: redis.client.PubSub = client.pubsub()
    try:
        add_channel(client, subscription, channel)
    except BaseException:
        subscription.close()
        raise
    return subscription


def add_channel(client: Any, subscription: redis.client.PubSub, channel: str) -> None:
    """Make a subscription hear another channel too; its confirmation is still to come."""
    (subscription.ssubscribe if is_cluster(client) else subscription.subscribe)(channel)


def drop_channel(client: Any, subscription: redis.client.PubSub, channel: str) -> None:
    """The opposite of `add_channel`."""
    drop: Any = subscription.sunsubscribe if is_cluster(client) else subscription.unsubscribe
    drop(channel)


def publish(client: Any, channel: str, message: str | bytes) -> None:
    """To all who hear the channel by `subscribe`."""
    client.execute_command("SPUBLISH" if is_cluster(client) else "PUBLISH", channel, message)


def hear(subscription: redis.client.PubSub, timeout_s: float) -> tuple[str, bytes] | None:
    """What a subscription brings next, or None after `timeout_s`: `message` with its payload, or another word.

    `subscribe`: a confirmation, the first or another after redis-py has reconnected by itself. ConnectionError when the channel
    has moved to another node of the cluster.
    """
    received = receive(subscription, timeout_s)
    if received is None:
        return None
    kind, _, data = received
    if kind == "sunsubscribe":
        raise redis.ConnectionError(MOVED)
    return kind, data


def receive(subscription: redis.client.PubSub, timeout_s: float) -> tuple[str, str, bytes] | None:
    """As `hear`, of a subscription to many channels: kind, channel and payload.

    With `sunsubscribe` the channel was given up, or has moved to another node of the cluster.
    """
    subscription.check_health()
    connection: Any = subscription.connection
    if not connection.can_read(timeout=timeout_s):  # get_message alone would drop the connection at half a message
        return None
    message = subscription.get_message(timeout=REST_S)
    if message is None:
        return None
    kind = message["type"].removeprefix("s") if message["type"] in ("smessage", "ssubscribe") else message["type"]
    return kind, (message["channel"] or b"").decode(), message["data"]


def descriptor(subscription: redis.client.PubSub) -> int:
    """The file that an event loop may watch: it can be read when the subscription brings something."""
    sock = getattr(subscription.connection, "_sock", None)  # redis-py has no public name for it
    if sock is None:
        raise redis.ConnectionError("the subscription has lost its connection")
    number: int = sock.fileno()
    return number


def _remedy(error: redis.RedisError) -> str:
    said = str(error)
    if isinstance(error, (AuthenticationError, AuthorizationError)) or said.startswith(("NOAUTH", "WRONGPASS")):
        return "mend user name and password in its URL"
    if "DB index" in said:
        return "mend the database number at the end of its URL"
    if isinstance(error, (MovedError, ClusterError)):
        return f"it belongs to a cluster: mend its URL, which is one of {FORMS}"
    if isinstance(error, NoPermissionError):
        return "give this user what docs/operations.md lists, or another user in its URL"
    if "_ssl.c" in said:  # as OpenSSL's reasons end
        return "mend ssl_ca_certs (or what else begins with ssl_) in its URL, or the server's certificate"
    if isinstance(error, ResponseError) or not isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return "it answers, but not this: mend its settings, or give the URL of another"
    if isinstance(error, redis.BusyLoadingError) or "max number of clients" in said or NOT_NOW in said:
        return "it is busy: try again later, or give the URL of another"
    if isinstance(error, redis.TimeoutError):
        return "see whether it answers a PING on its own host, then look at the way there"
    return "start one with `worker redis`, or give the URL of another"


def _options(url: str, queue: str | None, timeout_s: float) -> dict[str, Any]:
    """Arguments of a connection pool. ValueError for what cannot be read."""
    common: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": None,
        "protocol": 2,
        "decode_responses": False,
        "driver_info": None,  # or each connection would tell two things more, which limited users may not
    }
    several = _SEVERAL.fullmatch(url)
    if several is None:
        return _single(url, common)
    user, query, path = several["user"], several["query"], several["path"].strip("/")
    master, _, database = path.partition("/") if several["kind"] == "sentinel" else (path, "", "")
    if bool(master) != (several["kind"] == "sentinel"):
        raise ValueError("Sentinels need a master's name, and a cluster has no databases")
    nodes = [
        _single(f"{several['scheme']}://{user}{node}/{database}{query}", common, SENTINEL_ARGUMENTS)
        for node in several["nodes"].split(",")
    ]
    return _found(several["kind"], nodes, master, queue)


def _found(kind: str, nodes: Sequence[dict[str, Any]], master: str, queue: str | None) -> dict[str, Any]:
    """The options of connections to whom one of `nodes` names."""
    options = dict(nodes[0])
    port = SENTINEL_PORT if kind == "sentinel" else 6379
    addresses = [(node.get("host") or "localhost", node.get("port") or port) for node in nodes]
    plain = options.pop("connection_class", Connection)
    own = {name.removeprefix("sentinel_"): options.pop(name) for name in SENTINEL_ARGUMENTS if name in options}
    asking = {name: value for name, value in options.items() if name not in ("host", "port", "db", "max_connections")}
    if kind == "sentinel":
        asking = {name: value for name, value in asking.items() if name not in ("username", "password")} | own
        finder = _Finder(kind, addresses, lambda host, port: plain(host=host, port=port, **asking), master)
    else:
        if own or options.get("db"):
            raise ValueError("a cluster has neither Sentinels nor databases")
        if queue is None:
            raise InvalidOption("redis URL: a cluster is reached for one queue; name it")
        finder = _Finder(kind, addresses, lambda host, port: plain(host=host, port=port, **asking), Keys(queue).prefix)
    secure = issubclass(plain, SSLConnection)
    return options | {"connection_class": _FoundSSLConnection if secure else _FoundConnection, "find": finder}


def _single(url: str, common: Options, more_arguments: Sequence[str] = ()) -> dict[str, Any]:
    """The options of a URL with one host, or path. ValueError for what redis-py takes and would leave out, fail at with every
    call, or take in place of ours.
    """
    address = urlsplit(url)
    options: dict[str, Any] = dict(common) | parse_url(url)  # type: ignore[no-untyped-call]
    database = address.path.strip("/")
    if address.scheme != "unix" and database and not re.fullmatch("[0-9]{1,9}", database):
        raise ValueError("no database")
    if address.scheme == "unix" and not address.path:
        raise ValueError("no path")
    if "," in address.netloc.rpartition("@")[2]:
        raise ValueError("several hosts, and nothing that says which of them is meant")
    known = (*URL_ARGUMENTS, *more_arguments)
    if not all(name in known or name.startswith("ssl_") for name in parse_qs(address.query)):
        raise ValueError("an argument that is not the URL's to set")
    timeouts = (options["socket_timeout"], options["socket_connect_timeout"])
    if options.get("db", 0) < 0 or not all(0 < timeout < MAX_TIMEOUT_S for timeout in timeouts):
        raise ValueError("a timeout that cannot be waited for")
    if options.get("connection_class") is not UnixDomainSocketConnection:
        keepalive = {getattr(socket, name): value for name, value in KEEPALIVE_S.items() if hasattr(socket, name)}
        options = {"socket_keepalive": True, "socket_keepalive_options": keepalive} | options
    return options


class _Finder:
    """Asks nodes, one after the other, for the server to connect to; who has answered is asked first the next time.

    Threads may share it. Raises what went wrong with the last node when none of them answers.
    """

    def __init__(self, kind: str, nodes: Sequence[Address], make: Callable[[str, int], Any], name: str) -> None:
        """`name` is the master's, or the prefix of the queue's keys."""
        self.kind = kind
        self._nodes = tuple(nodes)
        self._make = make
        self._name = name

    def __str__(self) -> str:
        return f"{self.kind} {','.join(f'{host}:{port}' for host, port in self._nodes)}"

    def __call__(self) -> Address:
        error: redis.RedisError | None = None
        is_unknown = False
        for node in self._nodes:
            try:
                found = self._master(node) if self.kind == "sentinel" else self._owner(node)
            except redis.RedisError as refusal:
                error = refusal
                continue
            if found is not None:
                self._nodes = (node, *(other for other in self._nodes if other != node))
                return found
            is_unknown = True
        if error is None or is_unknown:
            raise redis.ConnectionError(f"none of them knows where {self._name} is") from error
        raise error

    def _master(self, node: Address) -> Address | None:
        answer = self._ask(node, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name)
        return None if answer is None else (answer[0].decode(), int(answer[1]))

    def _owner(self, node: Address) -> Address | None:
        slot = key_slot(self._name.encode())
        for first, last, (host, port, *_), *_ in self._ask(node, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return (host.decode() if host else "") or node[0], port  # a node that does not know its own name leaves it out
        return None

    def _ask(self, node: Address, *command: str) -> Any:
        connection = self._make(*node)
        try:
            connection.connect()
            connection.send_command(*command)
            return connection.read_response()
        finally:
            connection.disconnect()


class _Found:
    """Of a connection: asks where to connect, and takes it for lost when the server says that it is another's turn."""

    def __init__(self, *, find: _Finder, **options: Any) -> None:
        self._find = find
        super().__init__(**options)

    def _connect(self) -> Any:
        self.host, self.port = self._find()
        return super()._connect()  # type: ignore[misc]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except (AskError, ClusterDownError, MasterDownError, MovedError, ReadOnlyError) as error:
            said = f"{self.host}:{self.port} {NOT_NOW}: {error.status_code or type(error).__name__} {error}"
            raise redis.ConnectionError(said) from error  # which makes redis-py close it


class _FoundConnection(_Found, Connection):
    pass


class _FoundSSLConnection(_Found, SSLConnection):
    pass
