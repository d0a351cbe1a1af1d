"""A snapshot on the wire: what goes in comes out, and what strangers write there breaks nothing."""

import json
from dataclasses import asdict, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.looks import engine, request, snapshot
from worker.codec import MalformedError
from worker.command import plain
from worker.snapshot import MAX_BYTES, MAX_REQUESTS, Buckets, Snapshot, decode, encode, shorten
from worker.top.figures import between, total

FULL = snapshot([request("a"), request("b", phase="alone", width=3, resumed=7)], claimed=2, ending=1)


def with_field(**changes: Any) -> bytes:
    return msgpack.packb(asdict(FULL) | changes)


def test_what_is_encoded_is_decoded() -> None:
    assert decode(encode(FULL)) == FULL


def test_fields_of_later_versions_are_passed_over() -> None:
    packed = with_field(weather="fine", engines=[asdict(FULL.engines[0]) | {"colour": [1]}])
    assert decode(packed) == FULL


def test_fields_that_are_missing_are_empty() -> None:
    assert decode(msgpack.packb({"v": 1, "id": "w"})) == Snapshot(id="w")


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"hello",
        b"\xff" * 100,
        msgpack.packb([1]),
        msgpack.packb(None),
        msgpack.packb({"v": 2, "id": "w"}),
        msgpack.packb({"v": 1}),
        msgpack.packb({"v": 1, "id": 7}),
        msgpack.packb({"v": 1, "id": "w"}) + b"\x00",
        msgpack.packb({"v": 1, "id": "w", "x": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"v": 1, "id": "w" * MAX_BYTES}),
        b"\x91" * 1000 + b"\x00",
    ],
)
def test_what_is_no_snapshot_is_refused(packed: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(packed)


@pytest.mark.parametrize("value", [None, -1, "x" * 9999, [], [[]], {}, {"a": {}}, float("nan"), True, b"\x00", 2**63])
@pytest.mark.parametrize("name", sorted(set(asdict(FULL)) - {"v", "id"}))
def test_a_value_of_a_wrong_type_is_as_if_it_were_not_there(name: str, value: object) -> None:
    read = decode(with_field(**{name: value}))
    assert type(getattr(read, name)) is type(getattr(FULL, name))
    assert replace(read, **{name: getattr(FULL, name)}) == FULL


@pytest.mark.parametrize("number", [-1, 2**64 - 1, 1e308, float("inf"), float("nan"), "7", None, [], True, 5e-324])
def test_numbers_are_bounded(number: object) -> None:
    read = decode(with_field(pid=number, up_s=number, counters={"a": number}))
    assert all(value == 0 or 2**-53 <= value <= 2**53 for value in (read.pid, read.up_s, read.counters["a"]))


@pytest.mark.parametrize("up_s", [5e-324, 1e-300, 2**-53, 2**53])
@pytest.mark.parametrize("count", [5e-324, 1e-300, 1e308])
def test_what_is_made_of_the_numbers_of_strangers_are_numbers(up_s: float, count: float) -> None:
    latencies = {"queue": {"bounds": [1e-300, 1.0], "counts": [0, count, 0]}, "first_token": {"bounds": [], "counts": [count]}}
    now = decode(with_field(up_s=up_s, counters={"generated_tokens": count}, latencies=latencies))
    later = replace(now, latencies={"first_token": Buckets(), "queue": Buckets()})
    shown = total([between(None, now), between(now, later), between(None, later)]).data()
    assert json.dumps(shown, allow_nan=False)


def test_lists_are_bounded() -> None:
    read = decode(with_field(requests=[{}] * 2000, engines=[{}] * 1000, counters={str(i): 1 for i in range(500)}))
    assert (len(read.requests), len(read.engines), len(read.counters)) == (MAX_REQUESTS, 64, 64)


@pytest.mark.parametrize(
    "buckets",
    [
        {"bounds": [1, 2], "counts": [1]},
        {"bounds": [2, 1], "counts": [1, 1, 1]},
        {"bounds": [1, 1], "counts": [1, 1, 1]},
        {"bounds": [], "counts": [1]},
        7,
    ],
)
def test_buckets_that_do_not_fit_their_bounds_are_empty(buckets: object) -> None:
    assert decode(with_field(latencies={"first_token": buckets})).latencies == {"first_token": Buckets()}


def test_a_snapshot_of_many_long_ids_stays_small_and_counts_what_it_leaves_out() -> None:
    requests = [request("x" * 64, lane="\N{GRINNING FACE}" * 128) for _ in range(MAX_REQUESTS)]
    packed = encode(replace(FULL, requests=tuple(requests), left_out=10))
    read = decode(packed)
    assert len(packed) <= MAX_BYTES
    assert 0 < len(read.requests) < MAX_REQUESTS
    assert len(read.requests) + read.left_out == MAX_REQUESTS + 10


def test_no_more_requests_are_told_than_a_viewer_reads() -> None:
    read = decode(encode(replace(FULL, requests=tuple(request(str(i)) for i in range(MAX_REQUESTS + 5)))))
    assert (len(read.requests), read.left_out) == (MAX_REQUESTS, 5)


def test_eight_engines_of_256_slots_are_told_in_less_than_the_limit() -> None:
    requests = tuple(request(f"{i:064}", engine=i % 8) for i in range(MAX_REQUESTS))
    full = replace(FULL, engines=tuple(engine(requests, slots=256) for _ in range(8)), requests=requests)
    assert len(encode(full)) < MAX_BYTES // 2


@given(st.binary(max_size=300))
def test_any_bytes_are_a_snapshot_or_refused(data: bytes) -> None:
    try:
        read = decode(data)
    except MalformedError:
        return
    assert isinstance(read, Snapshot)


@pytest.mark.parametrize(
    ("text", "width", "short"), [("abc", 3, "abc"), ("abcdefgh", 5, "ab…gh"), ("abcdefgh", 4, "a…gh"), ("ab", 0, "")]
)
def test_long_ids_are_cut_in_the_middle(text: str, width: int, short: str) -> None:
    assert shorten(text, width) == short


def test_what_a_job_id_holds_is_kept_for_json_and_made_plain_for_a_terminal() -> None:
    read = decode(encode(snapshot([request("\x1b[2Jx")])))
    assert read.requests[0].id == "\x1b[2Jx"
    assert plain(read.requests[0].id).isprintable()
