"""What docs/protocol.md and docs/operations.md require of a server, as checks of `worker doctor`.

Relies on `server_facts` for what the server answered. What it refused to tell makes a check unknown, nothing else.
"""

import statistics
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from redis.crc import key_slot
from redis.exceptions import NoPermissionError

from worker.doctor.findings import Finding, Unknown, fail, ok, size, warn
from worker.doctor.server_facts import ServerFacts, commands_used, settled, text_of

SLOW_PING_S: Final = 0.01
"""Every flush and fetch waits for the server once."""
MAX_SKEW_S: Final = 1.0
"""Deadlines are unix time of whoever writes them."""
FULL: Final = 0.8
"""Share of a limit above which it is about to be met."""
UNBOUNDED: Final = 0.5
"""Share of the machine's memory that a server without a limit may take: rewriting the append-only file may double it."""
TINY_BUFFER_BYTES: Final = 1 << 20


def reachable(facts: ServerFacts) -> Finding:
    latency_s = statistics.median(facts.latencies_s)
    slowest_ms = max(facts.latencies_s) * 1000
    found = f"{latency_s * 1000:.2f} ms, the median of {len(facts.latencies_s)} PINGs, {slowest_ms:.2f} ms the slowest"
    if latency_s > SLOW_PING_S:
        return warn(f"{found}; more than {SLOW_PING_S * 1000:g} ms", "put server and workers nearer to each other")
    return ok(found)


def version(facts: ServerFacts) -> Finding:
    found = _version(facts)
    if not settled(facts.known, f"{found}; COMMAND INFO").get("FUNCTION"):
        return fail(f"{found}: has no FUNCTION command", "install Redis 7.0 or newer, or Valkey 7.2 or newer")
    return ok(found)


def _version(facts: ServerFacts) -> str:
    try:
        if isinstance(facts.info, Mapping) and "valkey_version" in facts.info:
            return f"Valkey {facts.field('valkey_version')}"
        return f"Redis {facts.field('redis_version')}"
    except Unknown:
        return "a server that does not tell its version"


def commands(facts: ServerFacts) -> Finding:
    known = settled(facts.known, "COMMAND INFO")
    missing = [name for name in sorted(commands_used()) if not known.get(name)]
    if missing:
        return fail(f"without {', '.join(missing)}", "use another server, or undo rename-command in its configuration")
    return ok(f"all {len(commands_used())} that are used")


def scripts(facts: ServerFacts) -> Finding:
    if facts.counted is not None:
        remedy = _acl(facts.url, "+@scripting", "~slotmill:*")
        is_forbidden = isinstance(facts.counted, NoPermissionError)
        return fail(
            f"counts.lua: {text_of(facts.counted)}", remedy if is_forbidden else "see commands, permissions and cluster"
        )
    return ok("counts.lua ran")


def permissions(facts: ServerFacts) -> Finding:
    refused = {name: str(error) for name, error in facts.trials.items() if isinstance(error, NoPermissionError)}
    if not refused:
        return ok(f"user {_user(facts.url)} may send all {len(facts.trials)} commands, on keys and channels of this queue")
    forbidden = [name.lower() for name, said in refused.items() if "run the" in said]
    grants = [f"+{name}" for name in forbidden]
    others = [said for said in refused.values() if "run the" not in said]
    grants += ["~slotmill:*"] if any("key" in said for said in others) else []
    grants += ["&slotmill:*"] if any("channel" in said for said in others) else []
    return fail(f"user {_user(facts.url)} lacks {' '.join(grants)}", _acl(facts.url, *grants))


def writes(facts: ServerFacts) -> Finding:
    refusal = facts.trials["SET"]
    if refusal is None:
        return ok("taken")
    if isinstance(refusal, NoPermissionError):
        raise Unknown("this user may not write", "see permissions")
    return fail(f"refused: {text_of(refusal)}", "see role, memory, aof, snapshots and cluster; until it writes again jobs wait")


def role(facts: ServerFacts) -> Finding:
    found = facts.field("role")
    if found == "master":
        return ok("master")
    if isinstance(facts.info, Mapping) and (host := facts.info.get("master_host")):
        return fail(f"a replica of {host}:{facts.info.get('master_port')}", "give the URL of its master")
    return fail(f"{found}", "give the URL of the master")


def eviction(facts: ServerFacts) -> Finding:
    policy = facts.field("maxmemory_policy")
    if policy != "noeviction":
        return fail(f"maxmemory-policy {policy}: jobs vanish when memory is short", _set("maxmemory-policy", "noeviction"))
    return ok("maxmemory-policy noeviction")


def memory(facts: ServerFacts) -> Finding:
    """Never advises a bound below what is used, at which every write is refused at once."""
    used, limit = facts.number("used_memory"), facts.number("maxmemory")
    if not limit:
        total = facts.number("total_system_memory")
        found = f"{size(used)} used, no maxmemory, {size(total)} in the machine"
        if used > UNBOUNDED * total:
            return warn(f"{found}: more than half", _set("maxmemory", str(int((used + total) / 2))))
        return ok(found)
    found = f"{used / limit:.0%} of maxmemory used, {size(used)} of {size(limit)}"
    if used > FULL * limit:
        return warn(f"{found}: above it writes are refused", _set("maxmemory", str(int(2 * max(used, limit)))))
    return ok(found)


def appendonly(facts: ServerFacts) -> Finding:
    if facts.field("aof_enabled"):
        return ok("appendonly yes")
    return fail("appendonly no: queued jobs are gone when the server dies", _set("appendonly", "yes"))


def appendfsync(facts: ServerFacts) -> Finding:
    policy = facts.setting("appendfsync")
    if policy == "no":
        return warn("appendfsync no: a power cut loses half a minute of jobs", _set("appendfsync", "everysec"))
    return ok(f"appendfsync {policy}")


def aof(facts: ServerFacts) -> Finding:
    written, rewritten = facts.field("aof_last_write_status"), facts.field("aof_last_bgrewrite_status")
    remedy = "free space on the server's disk; its log says what failed"
    if written != "ok":
        return fail(f"the last write of the append-only file: {written}", remedy)
    if rewritten != "ok":
        return warn(f"the last rewrite of the append-only file: {rewritten}", f"{remedy}; then BGREWRITEAOF")
    return ok("the last write and the last rewrite were well")


def snapshots(facts: ServerFacts) -> Finding:
    if facts.field("rdb_last_bgsave_status") == "ok":
        return ok("the last one was well")
    found = "the last one failed"
    if facts.setting("stop-writes-on-bgsave-error") == "yes":
        remedy = "free space on the server's disk, then BGSAVE; with appendonly yes they are not needed: CONFIG SET save ''"
        return fail(f"{found}, and with stop-writes-on-bgsave-error yes the server may refuse writes", remedy)
    return warn(found, "free space on the server's disk, then BGSAVE")


def buffers(facts: ServerFacts) -> Finding:
    setting = facts.setting("client-output-buffer-limit").split()
    if "pubsub" not in setting[:-3]:
        raise Unknown("the server has no client-output-buffer-limit for pubsub")
    at = setting.index("pubsub")
    hard, soft, seconds = setting[at + 1 : at + 4]
    remedy = _set("client-output-buffer-limit", "pubsub 64mb 16mb 30")
    found = f"client-output-buffer-limit pubsub {hard} {soft} {seconds}"
    limits = [int(limit) for limit in (hard, soft) if int(limit)]
    if not limits:
        return warn(f"{found}: a slow subscriber fills the server's memory", remedy)
    if min(limits) < TINY_BUFFER_BYTES:
        return warn(f"{found}: subscribers are dropped, and replay, all the time", remedy)
    return ok(found)


def timeout(facts: ServerFacts) -> Finding:
    seconds = facts.setting("timeout")
    if seconds != "0":
        return warn(f"timeout {seconds}: connections idle for so many seconds are closed", _set("timeout", "0"))
    return ok("timeout 0")


def keepalive(facts: ServerFacts) -> Finding:
    seconds = facts.setting("tcp-keepalive")
    if seconds == "0":
        return warn("tcp-keepalive 0: dead peers are never noticed", _set("tcp-keepalive", "60"))
    return ok(f"tcp-keepalive {seconds}")


def clients(facts: ServerFacts) -> Finding:
    connected, limit = facts.number("connected_clients"), int(facts.setting("maxclients"))
    found = f"{connected:.0f} of {limit} connections"
    return warn(found, _set("maxclients", str(2 * limit))) if connected > FULL * limit else ok(found)


def password(facts: ServerFacts) -> Finding:
    address = urlsplit(facts.url)
    if address.password or "password" in parse_qs(address.query):
        return ok("asked for")
    if is_local(facts.url):
        return ok("none, on an address of this machine")
    remedy = "ACL SETUSER default >PASSWORD, and the URL with it in SLOTMILL_REDIS_URL"
    return warn("none: whoever reaches the server reads prompts and answers", remedy)


def tls(facts: ServerFacts) -> Finding:
    if urlsplit(facts.url).scheme.startswith("rediss"):
        return ok("yes")
    if is_local(facts.url):
        return ok("none, on an address of this machine")
    return warn("none: prompts and answers cross the network readable", "tls-port in its configuration, and a rediss:// URL")


def cluster(facts: ServerFacts) -> Finding:
    if not facts.field("cluster_enabled"):
        return ok("none; one node has all")
    slot, state = key_slot(facts.keys.prefix.encode()), settled(facts.cluster, "CLUSTER INFO").get("cluster_state")
    if not any(first <= slot <= last for first, last in settled(facts.slots, "CLUSTER SLOTS")):
        return fail(f"nobody serves slot {slot} of this queue", f"redis-cli --cluster fix, or CLUSTER ADDSLOTS {slot}")
    if state != "ok":
        return fail(f"cluster_state {state}", "CLUSTER INFO and CLUSTER NODES say which slots are without a node")
    return ok(f"the whole queue is in slot {slot}, which is served")


def clock(facts: ServerFacts) -> Finding:
    ahead_s = settled(facts.ahead_s, "TIME")
    found = f"the server's is {abs(ahead_s):.3f} s {'ahead of' if ahead_s > 0 else 'behind'} ours"
    if abs(ahead_s) > MAX_SKEW_S:
        return warn(f"{found}: deadlines come too early or too late", "synchronise both machines: timedatectl set-ntp true")
    return ok(found)


CHECKS: Final = (
    reachable,
    version,
    commands,
    scripts,
    permissions,
    writes,
    role,
    eviction,
    memory,
    appendonly,
    appendfsync,
    aof,
    snapshots,
    buffers,
    timeout,
    keepalive,
    clients,
    password,
    tls,
    cluster,
    clock,
)
"""In the order of the table in docs/operations.md, which says what each of them wants."""


def is_local(url: str) -> bool:
    """Whether a URL's server is on this machine, by its address alone; where Sentinels or other nodes name it, nobody knows."""
    address = urlsplit(url)
    if "+" in address.scheme:
        return False
    if address.scheme == "unix" or address.hostname in (None, "localhost"):
        return True
    try:
        return ip_address(address.hostname or "").is_loopback
    except ValueError:
        return False


def _user(url: str) -> str:
    return unquote(urlsplit(url).username or "") or "default"


def _acl(url: str, *grants: str) -> str:
    return f"ACL SETUSER {_user(url)} {' '.join(grants)}"


def _set(name: str, value: str) -> str:
    quoted = f'"{value}"' if " " in value else value
    return f"CONFIG SET {name} {quoted}, and `{name} {value}` in its configuration"
