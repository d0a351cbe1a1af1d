"""What `worker doctor` asks a server, and what it was answered: facts, for the checks of `server_checks` to judge.

Asks once, as the user of the URL; a refusal is kept in place of the answer. All is read, but for the trial of rights: no server
tells every user what it may do, so each command that the scripts and the client send is tried on keys of its own, which are
deleted at once. Errors of connections are the caller's.
"""

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, TypeVar

import redis
from redis.exceptions import NoPermissionError, ResponseError

from worker.broker import Broker
from worker.doctor.findings import Unknown
from worker.keys import Keys

T = TypeVar("T")

NUM_PINGS: Final = 20
GRANT: Final = "give the user +info +config|get +command|info +time +zcount, or run this as another user"
SETTINGS: Final = (
    "appendfsync",
    "client-output-buffer-limit",
    "maxclients",
    "stop-writes-on-bgsave-error",
    "tcp-keepalive",
    "timeout",
)
OWN_COMMANDS: Final = (
    "COMMAND",
    "EVALSHA",
    "EXISTS",
    "GET",
    "HGETALL",
    "HMGET",
    "SCRIPT",
    "SUBSCRIBE",
    "XGROUP",
    "XRANGE",
    "XREAD",
)
"""What worker and client send besides the scripts, or as part of them."""
TRIALS: Final = {
    "SET": "SET {string} 1 EX 60",
    "GET": "GET {string}",
    "EXISTS": "EXISTS {string}",
    "RENAME": "RENAME {string} {renamed}",
    "EXPIRE": "EXPIRE {renamed} 60",
    "HSET": "HSET {hash} field 1; EXPIRE {hash} 60",
    "HGET": "HGET {hash} field",
    "HEXISTS": "HEXISTS {hash} field",
    "HMGET": "HMGET {hash} field",
    "HGETALL": "HGETALL {hash}",
    "HINCRBY": "HINCRBY {hash} field 1",
    "HDEL": "HDEL {hash} field",
    "XADD": "XADD {stream} 1-1 field 1; EXPIRE {stream} 60",
    "XLEN": "XLEN {stream}",
    "XRANGE": "XRANGE {stream} - + COUNT 1",
    "XREVRANGE": "XREVRANGE {stream} + - COUNT 1",
    "XREAD": "XREAD COUNT 1 STREAMS {stream} 0",
    "XGROUP": "XGROUP CREATE {stream} workers 0",
    "XINFO": "XINFO GROUPS {stream}",
    "XREADGROUP": "XREADGROUP GROUP workers doctor COUNT 1 STREAMS {stream} >",
    "XPENDING": "XPENDING {stream} workers",
    "XCLAIM": "XCLAIM {stream} workers doctor 0 1-1",
    "XACK": "XACK {stream} workers 1-1",
    "XDEL": "XDEL {stream} 1-1",
    "ZADD": "ZADD {set} 1 member; EXPIRE {set} 60",
    "ZCARD": "ZCARD {set}",
    "ZSCAN": "ZSCAN {set} 0",
    "ZSCORE": "ZSCORE {set} member",
    "ZRANGE": "ZRANGE {set} 0 0",
    "ZREM": "ZREM {set} member",
    "ZREMRANGEBYSCORE": "ZREMRANGEBYSCORE {set} -inf 0",
    "PUBLISH": "PUBLISH {channel} -",
    "TIME": "TIME",
    "COMMAND": "COMMAND INFO get",
    "SCRIPT": "SCRIPT LOAD return(1)",
    "EVALSHA": f"EVALSHA {'0' * 40} 0",
    "UNLINK": "UNLINK {string} {renamed} {hash} {stream} {set}",
}
"""A harmless use of each command, and what keeps that from staying for ever. What writes comes first, what deletes last."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server answered; where it refused, the error that it refused with."""

    url: str
    keys: Keys
    latencies_s: Sequence[float]
    info: Mapping[str, Any] | ResponseError
    config: Mapping[str, Mapping[str, str] | ResponseError]
    known: Mapping[str, bool] | ResponseError
    """Whether the server has a command."""
    trials: Mapping[str, ResponseError | None]
    """Command -> what it was refused with."""
    counted: ResponseError | None
    """What the script `counts` was refused with."""
    ahead_s: float | ResponseError
    """How far the server's clock is ahead of ours."""
    cluster: Mapping[str, str] | ResponseError
    slots: Sequence[tuple[int, int]] | ResponseError
    """Ranges of slots that a node serves."""

    def field(self, name: str) -> Any:
        """A field of INFO."""
        value = settled(self.info, "INFO").get(name)
        if value is None:
            raise Unknown(f"the server does not tell {name}")
        return value

    def number(self, name: str) -> float:
        """A field of INFO that is a number."""
        value = self.field(name)
        if not isinstance(value, int | float):
            raise Unknown(f"the server's {name} is no number")
        return value

    def setting(self, name: str) -> str:
        """A setting, from CONFIG GET."""
        answer = settled(self.config[name], f"CONFIG GET {name}")
        if name not in answer:
            raise Unknown(f"the server has no setting {name}")
        return answer[name]


def gather(client: redis.Redis, url: str, queue: str) -> ServerFacts:
    """Ask a server everything that the checks want to know. Raises redis' errors of connections."""
    keys = Keys(queue)
    latencies_s = [_timed(lambda: ask(client, "PING")) for _ in range(NUM_PINGS)]
    info = ask(client, "INFO")
    is_cluster = isinstance(info, Mapping) and info.get("cluster_enabled") == 1
    names = sorted(commands_used() | {"FUNCTION"})
    known = ask(client, "COMMAND INFO", *names)
    if isinstance(known, Sequence):
        known = {name: row is not None for name, row in zip(names, known, strict=True)}
    slots = ask(client, "CLUSTER SLOTS") if is_cluster else ()
    return ServerFacts(
        url=url,
        keys=keys,
        latencies_s=latencies_s,
        info=info,
        config={name: ask(client, "CONFIG GET", name) for name in SETTINGS},
        known=known,
        trials=_tried(client, keys),
        counted=_refusal(lambda: Broker(client, queue, "doctor").queue_counts()),
        ahead_s=_ahead_s(client),
        cluster=ask(client, "CLUSTER INFO") if is_cluster else {},
        slots=slots if isinstance(slots, ResponseError) else [(row[0], row[1]) for row in slots],
    )


def told(function: Callable[[], T]) -> T | ResponseError:
    """What calls to a server answer, or the error that one was refused with."""
    try:
        return function()
    except ResponseError as error:
        return error
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # redis-py trips over what another server answers
        return ResponseError(f"an answer that cannot be read ({type(error).__name__})")


def ask(client: redis.Redis, *words: str) -> Any:
    """The reply to one command, or the error that it was refused with."""
    server: Any = client  # redis-py's types know no answers
    return told(lambda: server.execute_command(*words))


def text_of(refusal: ResponseError) -> str:
    """The first line of an error, for people."""
    return next(iter(str(refusal).splitlines()), "")[:200].rstrip(" .") or "refused"


def settled(answer: T | ResponseError, what: str) -> T:
    """The answer. Raises Unknown for a refusal."""
    if isinstance(answer, ResponseError):
        raise Unknown(f"{what}: {text_of(answer)}", GRANT if isinstance(answer, NoPermissionError) else "")
    return answer


@cache
def commands_used() -> frozenset[str]:
    """Commands that the scripts call, and those that worker and client send."""
    folder = resources.files("worker.scripts")
    texts = [file.read_text("utf-8") for file in folder.iterdir() if file.name.endswith(".lua")]
    return frozenset(re.findall(r"redis\.p?call\('([A-Z]+)'", "\n".join(texts))) | {"PUBLISH", *OWN_COMMANDS}


def _timed(function: Callable[[], object]) -> float:
    started = time.monotonic()
    function()
    return time.monotonic() - started


def _ahead_s(client: redis.Redis) -> float | ResponseError:
    started = time.time()
    reply = ask(client, "TIME")
    return reply if isinstance(reply, ResponseError) else reply[0] + reply[1] / 1e6 - (started + time.time()) / 2


def _refusal(function: Callable[[], object]) -> ResponseError | None:
    answer = told(function)
    return answer if isinstance(answer, ResponseError) else None


def _tried(client: redis.Redis, keys: Keys) -> dict[str, ResponseError | None]:
    """What each command that is used was refused with, by use of it on keys of our own."""
    trial = f"doctor-{secrets.token_hex(8)}"
    names = {name: keys.scratch(trial, name) for name in ("string", "renamed", "hash", "stream", "set")}
    names["channel"] = keys.channel(trial)
    outcomes: dict[str, ResponseError | None] = {}
    for command, lines in TRIALS.items():
        replies = [ask(client, *line.format(**names).split()) for line in lines.split(";")]
        outcomes[command] = replies[0] if isinstance(replies[0], ResponseError) else None
    outcomes["SUBSCRIBE"] = _refusal(lambda: Broker(client, keys.queue, "doctor").listen().close())
    return outcomes
