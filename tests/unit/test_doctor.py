"""What `worker doctor` concludes from answers of a server and looks around a machine that are made up here."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from redis.exceptions import NoPermissionError, ReadOnlyError, ResponseError

from engine.errors import ConfigError
from worker.broker import LaneCounts
from worker.doctor import machine_checks, queue_checks, server_checks
from worker.doctor.findings import GIB, Finding, Row, run_checks
from worker.doctor.machine_checks import MachineFacts
from worker.doctor.queue_checks import Consumer, QueueFacts
from worker.doctor.server_facts import TRIALS, ServerFacts, commands_used
from worker.keys import Keys

REFUSED = NoPermissionError("this user has no permissions to run the 'it' command")
INFO: Mapping[str, Any] = {
    "redis_version": "7.0.15",
    "role": "master",
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
    "used_memory": GIB,
    "total_system_memory": 8 * GIB,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "aof_last_bgrewrite_status": "ok",
    "rdb_last_bgsave_status": "ok",
    "connected_clients": 5,
    "cluster_enabled": 0,
}
CONFIG = {
    "appendfsync": "everysec",
    "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60",
    "maxclients": "10000",
    "stop-writes-on-bgsave-error": "yes",
    "tcp-keepalive": "300",
    "timeout": "0",
}
SERVER = ServerFacts(
    url="redis://127.0.0.1:6379/0",
    keys=Keys("q"),
    latencies_s=[0.001] * 20,
    info=INFO,
    config={name: {name: value} for name, value in CONFIG.items()},
    known=dict.fromkeys(commands_used() | {"FUNCTION"}, True),
    trials=dict.fromkeys(commands_used(), None),
    counted=None,
    ahead_s=0.01,
    cluster={},
    slots=[],
)
QUEUE = QueueFacts(
    queue="q",
    has_groups=[True] * 3,
    live={"w1": 2.0},
    config={"max_queued": "5"},
    counts={"high": LaneCounts(0, 0, 0.0), "normal": LaneCounts(9, 2, 100.0), "low": LaneCounts(0, 0, 0.0)},
    num_dead=0,
    num_overdue=0,
    consumers=[Consumer("w1", 2), Consumer("w0", 0), Consumer("released", 4), Consumer("suspects", 1)],
)
TORCH: Mapping[str, Any] = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "gpus": ["NVIDIA H200"],
    "kernels": [{"name": "reference", "device": "cuda:0", "error": 1e-6, "limit": 1e-4}],
}
MACHINE = MachineFacts(
    python=(3, 11, 7),
    packages={"redis": (Requirement("redis>=6,<9"), "8.1.0")},
    num_gpus=1,
    driver="580.1",
    torch=TORCH,
    model="m",
    found_model=Path("/m"),
    cache=Path("/c"),
    is_cache_writable=True,
    free_disk_bytes=9 * GIB,
    free_memory_bytes=9 * GIB,
    port=9400,
    port_error=None,
    max_files=4096,
)


def info(**changes: object) -> ServerFacts:
    return replace(SERVER, info={**INFO, **changes})


def setting(name: str, value: str) -> ServerFacts:
    return replace(SERVER, config={**SERVER.config, name: {name: value}})


def kernels(error: object, **changes: object) -> MachineFacts:
    return replace(MACHINE, torch={**TORCH, "kernels": [{**TORCH["kernels"][0], "error": error}], **changes})


def judged(check: Callable[[Any], Finding], facts: object) -> Row:
    (row,) = run_checks("part", [check], facts)
    return row


@pytest.mark.parametrize(
    ("section", "facts"), [(server_checks, SERVER), (queue_checks, QUEUE), (machine_checks, MACHINE)], ids=["s", "q", "m"]
)
def test_nothing_is_amiss_where_all_is_as_it_should_be(section: Any, facts: object) -> None:
    rows = run_checks("part", section.CHECKS, facts)
    assert [(row.check, row.remedy) for row in rows if row.verdict != "ok" or row.remedy] == []


@pytest.mark.parametrize(
    ("check", "facts", "verdict", "found", "remedy"),
    [
        (
            "reachable",
            replace(SERVER, latencies_s=[0.001, 0.02, 0.5]),
            "warn",
            "20.00 ms, the median of 3 PINGs, 500.00 ms the slowest",
            "nearer",
        ),
        ("version", info(valkey_version="8.1.8"), "ok", "Valkey 8.1.8", ""),
        ("version", replace(SERVER, known={"FUNCTION": False}), "fail", "Redis 7.0.15: has no FUNCTION", "Redis 7.0 or newer"),
        ("commands", replace(SERVER, known={**SERVER.known, "XADD": False}), "fail", "without XADD", "rename-command"),
        (
            "scripts",
            replace(SERVER, counted=REFUSED),
            "fail",
            "counts.lua: this user has no",
            "ACL SETUSER default +@scripting",
        ),
        ("scripts", replace(SERVER, counted=ResponseError("odd")), "fail", "counts.lua: odd", "see commands"),
        ("writes", replace(SERVER, trials={"SET": ReadOnlyError("no")}), "fail", "refused: no", "role, memory"),
        ("writes", replace(SERVER, trials={"SET": REFUSED}), "unknown", "may not write", "permissions"),
        ("role", info(role="slave", master_host="10.0.0.7", master_port=6380), "fail", "replica of 10.0.0.7:6380", "master"),
        ("eviction", info(maxmemory_policy="allkeys-lru"), "fail", "allkeys-lru", "CONFIG SET maxmemory-policy noeviction"),
        (
            "memory",
            info(used_memory=5 * GIB),
            "warn",
            "5 GiB used, no maxmemory, 8 GiB",
            f"CONFIG SET maxmemory {13 * GIB // 2}",
        ),
        ("memory", info(used_memory=GIB, maxmemory=GIB), "warn", "100% of maxmemory", f"CONFIG SET maxmemory {2 * GIB}"),
        ("memory", info(used_memory=3 * GIB, maxmemory=GIB), "warn", "300% of maxmemory", f"CONFIG SET maxmemory {6 * GIB}"),
        ("memory", info(maxmemory=2 * GIB), "ok", "50% of maxmemory used", ""),
        ("appendonly", info(aof_enabled=0), "fail", "appendonly no", "CONFIG SET appendonly yes"),
        ("appendfsync", setting("appendfsync", "no"), "warn", "appendfsync no", "CONFIG SET appendfsync everysec"),
        ("appendfsync", setting("appendfsync", "always"), "ok", "always", ""),
        ("aof", info(aof_last_write_status="err"), "fail", "the last write", "free space"),
        ("aof", info(aof_last_bgrewrite_status="err"), "warn", "the last rewrite", "BGREWRITEAOF"),
        ("snapshots", info(rdb_last_bgsave_status="err"), "fail", "may refuse writes", "BGSAVE"),
        (
            "snapshots",
            replace(setting("stop-writes-on-bgsave-error", "no"), info={**INFO, "rdb_last_bgsave_status": "err"}),
            "warn",
            "the last one failed",
            "BGSAVE",
        ),
        ("buffers", setting("client-output-buffer-limit", "pubsub 0 0 0"), "warn", "slow subscriber", "pubsub 64mb 16mb 30"),
        ("buffers", setting("client-output-buffer-limit", "pubsub 0 1000 1"), "warn", "dropped", '"pubsub 64mb 16mb 30"'),
        ("buffers", setting("client-output-buffer-limit", "normal 0 0 0"), "unknown", "no client-output", ""),
        ("timeout", setting("timeout", "300"), "warn", "timeout 300", "CONFIG SET timeout 0"),
        ("keepalive", setting("tcp-keepalive", "0"), "warn", "dead peers", "CONFIG SET tcp-keepalive 60"),
        ("clients", setting("maxclients", "6"), "warn", "5 of 6 connections", "CONFIG SET maxclients 12"),
        ("password", replace(SERVER, url="redis://cache/0"), "warn", "none", "ACL SETUSER default >PASSWORD"),
        ("password", replace(SERVER, url="redis://:s3cret@cache/0"), "ok", "asked for", ""),
        ("password", replace(SERVER, url="redis://cache/0?password=s3cret"), "ok", "asked for", ""),
        ("tls", replace(SERVER, url="redis://:s3cret@10.0.0.7:6379/0"), "warn", "none", "rediss://"),
        ("tls", replace(SERVER, url="rediss://:s3cret@10.0.0.7:6379/0"), "ok", "yes", ""),
        ("tls", replace(SERVER, url="unix:///run/s"), "ok", "this machine", ""),
        ("tls", replace(SERVER, url="redis://[::1]:6379"), "ok", "this machine", ""),
        ("tls", replace(SERVER, url="redis+sentinel://127.0.0.1,10.0.0.7/m"), "warn", "none", "rediss://"),
        ("clock", replace(SERVER, ahead_s=-7.5), "warn", "7.500 s behind ours", "timedatectl"),
        ("clock", replace(SERVER, ahead_s=REFUSED), "unknown", "TIME: this user", "+time"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_that_is_amiss_is_told_how_to_be_mended(
    check: str, facts: ServerFacts, verdict: str, found: str, remedy: str
) -> None:
    row = judged(getattr(server_checks, check), facts)
    assert (row.verdict, row.check) == (verdict, check)
    assert found in row.found
    assert remedy in row.remedy
    assert "s3cret" not in row.found + row.remedy


@pytest.mark.parametrize(
    ("state", "slots", "verdict", "found"),
    [
        ("ok", [(0, 8000), (8001, 16383)], "ok", "in slot"),
        ("ok", [(0, 5), (16383, 16383)], "fail", "nobody serves slot"),
        ("fail", [(0, 16383)], "fail", "cluster_state fail"),
        ("ok", ResponseError("no"), "unknown", "CLUSTER SLOTS: no"),
    ],
)
def test_the_slot_of_the_queue_must_be_served(state: str, slots: Any, verdict: str, found: str) -> None:
    facts = replace(info(cluster_enabled=1), cluster={"cluster_state": state}, slots=slots)
    row = judged(server_checks.cluster, facts)
    assert (row.verdict, found in row.found) == (verdict, True)


@pytest.mark.parametrize(
    ("said", "grants"),
    [
        ("this user has no permissions to run the 'xadd' command", "+xadd"),
        ("User w has no permissions to run the 'xadd' command", "+xadd"),
        ("this user has no permissions to access one of the keys used as arguments", "~slotmill:*"),
        ("No permissions to access a key", "~slotmill:*"),
        ("this user has no permissions to access one of the channels used as arguments", "&slotmill:*"),
    ],
)
def test_what_a_user_may_not_do_is_granted_by_one_command(said: str, grants: str) -> None:
    trials = {**SERVER.trials, "XADD": NoPermissionError(said), "SET": ResponseError("OOM")}
    row = judged(server_checks.permissions, replace(SERVER, url="redis://w:s3cret@h/0", trials=trials))
    assert (row.verdict, row.remedy) == ("fail", f"ACL SETUSER w {grants}")


def test_every_command_that_is_used_is_tried_and_no_other() -> None:
    assert commands_used() ^ set(TRIALS) == {"SUBSCRIBE"}  # which is tried on a connection of its own


def test_a_server_that_tells_nothing_makes_checks_unknown_and_says_why() -> None:
    silent = replace(
        SERVER,
        info=REFUSED,
        config=dict.fromkeys(CONFIG, REFUSED),
        known=REFUSED,
        ahead_s=REFUSED,
    )
    rows = {row.check: row for row in run_checks("server", server_checks.CHECKS, silent)}
    told = {"reachable", "scripts", "permissions", "writes", "password", "tls"}
    assert {name for name, row in rows.items() if row.verdict == "ok"} == told
    assert {row.verdict for name, row in rows.items() if name not in told} == {"unknown"}
    assert rows["timeout"].found == "CONFIG GET timeout: this user has no permissions to run the 'it' command"
    assert "+config|get" in rows["timeout"].remedy


@pytest.mark.parametrize("value", [None, "plenty"])
def test_a_server_without_a_field_makes_the_check_unknown(value: object) -> None:
    assert judged(server_checks.memory, info(used_memory=value)).verdict == "unknown"


@pytest.mark.parametrize(
    ("check", "facts", "verdict", "found", "remedy"),
    [
        ("group", replace(QUEUE, has_groups=[True, False, True]), "warn", "not on every lane", "worker start --queue q"),
        ("workers", replace(QUEUE, live={}), "warn", "none", "worker start --queue q"),
        ("paused", replace(QUEUE, config={"paused": "1"}), "warn", "paused", "worker queue resume --queue q"),
        ("paused", replace(QUEUE, config={"paused": "1", "closed": "1"}), "warn", "paused and closed", "resume"),
        ("oldest", replace(QUEUE, counts={"low": LaneCounts(1, 0, 3601.0)}), "warn", "3601 s in lane low", "worker start"),
        ("oldest", replace(QUEUE, counts={"low": LaneCounts(0, 0, 0.0)}), "ok", "no job waits", ""),
        ("abandoned", replace(QUEUE, live={"w0": 1.0}), "warn", "2 jobs held by w1", "lease"),
        ("overdue", replace(QUEUE, num_overdue=3), "warn", "3 delayed jobs", "worker start"),
        ("dead", replace(QUEUE, num_dead=2), "warn", "2 jobs were set aside", "worker dead list --queue q"),
        ("dead", replace(QUEUE, num_dead=REFUSED), "unknown", "XLEN dead: this user", ""),
        ("abandoned", replace(QUEUE, live=REFUSED), "unknown", "heartbeats: this user", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_queue_that_nobody_serves_well_is_told(check: str, facts: QueueFacts, verdict: str, found: str, remedy: str) -> None:
    row = judged(getattr(queue_checks, check), facts)
    assert row.verdict == verdict
    assert found in row.found
    assert remedy in row.remedy


@pytest.mark.parametrize(
    ("check", "facts", "verdict", "found", "remedy"),
    [
        ("python", replace(MACHINE, python=(3, 10, 2)), "fail", "3.10.2", "Python 3.11"),
        (
            "packages",
            replace(MACHINE, packages={"a": (Requirement("a>=2"), "1.9"), "b": (Requirement("b<3"), None)}),
            "fail",
            "a 1.9, b missing",
            "pip install 'a>=2' 'b<3'",
        ),
        ("packages", replace(MACHINE, packages=None), "unknown", "not installed", "pip install"),
        ("torch", replace(MACHINE, torch="no module named torch"), "fail", "no module named torch", "pip install"),
        ("gpu", replace(MACHINE, torch="no module named torch"), "unknown", "see torch", ""),
        ("gpu", replace(MACHINE, num_gpus=0, driver=None, torch="broken"), "ok", "none visible, no driver", ""),
        ("gpu", replace(MACHINE, torch={**TORCH, "cuda": None, "gpus": []}), "fail", "a torch without CUDA", "--cpu"),
        ("gpu", replace(MACHINE, num_gpus=2), "fail", "2 visible, driver 580.1, torch can use 1", "nvidia-smi"),
        ("kernels", kernels(2e-3), "fail", "reference on cuda:0: 0.002 over 0.0001", "another device"),
        ("kernels", kernels(float("nan")), "fail", "nan over", "another device"),
        ("kernels", kernels("no kernel image"), "fail", "no kernel image", "another device"),
        ("model", replace(MACHINE, found_model=None), "warn", "the first start fetches it", "worker model path m"),
        ("model", replace(MACHINE, found_model=ConfigError("model: m: no such file")), "fail", "m: no such file", "mend"),
        ("cache", replace(MACHINE, is_cache_writable=False), "fail", "/c cannot be written to", "SLOTMILL_CACHE_DIR="),
        ("disk", replace(MACHINE, free_disk_bytes=GIB), "warn", "1 GiB free", "SLOTMILL_CACHE_DIR="),
        ("ram", replace(MACHINE, free_memory_bytes=GIB // 2), "warn", "512 MiB free", "--kv-memory"),
        ("port", replace(MACHINE, port_error="Address already in use"), "warn", "127.0.0.1:9400: Address", "--metrics-port 0"),
        ("files", replace(MACHINE, max_files=256), "warn", "256 open files", "ulimit -n 1024"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_machine_that_is_amiss_is_told_how_to_be_mended(
    check: str, facts: MachineFacts, verdict: str, found: str, remedy: str
) -> None:
    row = judged(getattr(machine_checks, check), facts)
    assert row.verdict == verdict
    assert found in row.found
    assert remedy in row.remedy


def test_the_kernels_of_this_machine_equal_their_twins() -> None:
    selfcheck = machine_checks.Selfcheck()
    report = selfcheck.report()
    assert isinstance(report, Mapping), report
    assert judged(machine_checks.kernels, replace(MACHINE, torch=report)).verdict == "ok"
    assert {row["name"] for row in report["kernels"]} == {"cpu", "cpu layers", "invariant"}


@pytest.mark.parametrize(
    ("code", "reason"), [("raise SystemExit('no torch here')", "no torch here"), ("raise SystemExit(3)", "ended with 3")]
)
def test_a_selfcheck_that_fails_says_why(code: str, reason: str) -> None:
    selfcheck = machine_checks.Selfcheck((machine_checks.SELFCHECK[0], "-c", code))
    assert selfcheck.report() == reason


def test_this_machine_is_looked_at_without_an_error() -> None:
    facts = machine_checks.gather("smollm2-135m-instruct", 0, TORCH)
    rows = {row.check: row for row in run_checks("machine", machine_checks.CHECKS, facts)}
    assert {rows[name].verdict for name in ("python", "packages", "model")} == {"ok"}
