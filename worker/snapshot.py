"""What a worker says of itself to who looks: plain data, its msgpack, and how it is read from strangers.

Relies on `codec` for bounded msgpack. Leaves making one to `self_view` and showing it to `worker/top`. Rules of the format, so
that workers and viewers of different versions get along:

1. Unknown fields are passed over; one that is missing or of a wrong type is as if it were empty.
2. A snapshot is bounded: `MAX_BYTES` in all, so many requests, engines and counters. What is left out is counted.
3. It holds ids, sizes and counts; never a prompt, an answer or an error's text.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import Any, Final, TypeVar, get_type_hints

from worker.codec import MalformedError, pack, unpack

VERSION: Final = 1
MAX_BYTES: Final = 256 * 1024
MAX_REQUESTS: Final = 512
MAX_ENGINES: Final = 64
MAX_COUNTS: Final = 64
MAX_BUCKETS: Final = 64
MAX_TEXT: Final = 128
LEAST: Final = 2.0**-53
"""Numbers below are 0: what is divided by them, or halves them, leaves what a float can be."""
MAX_ID: Final = 64
"""Longer job ids are cut in the middle."""

PHASES: Final = ("decode", "prefill", "alone", "beam", "held", "starting", "waiting")
"""What a request inside the engine does. `alone`: a suspect in its window; `beam`: a search, silent before its end;
`held`: it keeps its slot while a suspect runs alone; `starting`: it is in prefill or waits, the queue side cannot always tell
which; `waiting`: it holds no slot."""

D = TypeVar("D")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A job inside an engine. Tokens are of all its choices; `resumed` of them are an earlier attempt's."""

    id: str = ""
    lane: str = ""
    engine: int = 0
    phase: str = ""
    width: int = 1
    """Slots that it takes, or waits for."""
    prompt_tokens: int = 0
    tokens: int = 0
    resumed: int = 0
    max_tokens: int = 0
    age_s: float = 0.0
    """Since this worker took it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine after its last step; nothing but its device while it is down."""

    device: str = ""
    is_up: bool = False
    slots: int = 0
    taken: int = 0
    """Slots that are held after the last step; not all requests that have come since are in it."""
    running: int = 0
    waiting: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    """Slots taken, or waited for, by phase."""
    step: Mapping[str, float] = field(default_factory=dict)
    """Slots of the last step by what they did."""
    kv: Mapping[str, float] = field(default_factory=dict)
    """Blocks and positions, as `engine.stats.KVCounts` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """A histogram: `counts[k]` observations are at most `bounds[k]` and above the bound before, the last above them all."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One worker at one moment. Counters and latencies are since its start, `up_s` ago by its own clock."""

    v: int = VERSION
    id: str = ""
    host: str = ""
    pid: int = 0
    gpu: str = ""
    model: str = ""
    state: str = ""
    up_s: float = 0.0
    engines: tuple[EngineView, ...] = ()
    requests: tuple[RequestView, ...] = ()
    """In the order in which the engines got them."""
    left_out: int = 0
    """Requests beyond what `encode` has room for."""
    claimed: int = 0
    """Jobs taken and not in an engine yet."""
    ending: int = 0
    """Jobs whose end is being written."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """By the name of the metric, with a label's value behind a dot."""
    latencies: Mapping[str, Buckets] = field(default_factory=dict)
    """`first_token`, `between_tokens` and `queue`, in seconds."""


def encode(snapshot: Snapshot) -> bytes:
    """The bytes for the channel, within `MAX_BYTES`: as many requests as fit, `MAX_REQUESTS` at most, the others counted."""
    kept = snapshot.requests[:MAX_REQUESTS]
    while True:
        left_out = snapshot.left_out + len(snapshot.requests) - len(kept)
        packed = pack(asdict(replace(snapshot, requests=kept, left_out=left_out)))
        if len(packed) <= MAX_BYTES or not kept:
            return packed
        kept = kept[: len(kept) // 2]


def decode(packed: bytes) -> Snapshot:
    """Read what a worker, or whoever may write to the channel, says. `MalformedError`: it is no snapshot of this version."""
    if len(packed) > MAX_BYTES:
        raise MalformedError(f"a snapshot of {len(packed)} bytes, more than {MAX_BYTES}")
    value = unpack(packed, max_containers=8 * MAX_REQUESTS, max_items=8 * MAX_REQUESTS)
    if not isinstance(value, dict) or value.get("v") != VERSION or not _text(value.get("id")):
        raise MalformedError(f"no snapshot of version {VERSION}")
    return _record(Snapshot)(value)


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` characters, cut in the middle: ids often differ at their ends alone."""
    if len(text) <= width:
        return text
    head = max(0, width - 1) // 2
    return text[:head] + "…" * (width > 0) + text[len(text) - max(0, width - 1 - head) :]


def _text(value: object) -> str:
    return shorten(value, MAX_TEXT) if isinstance(value, str) else ""


def _number(value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    number = min(float(value), 2.0**53) if is_number else 0.0  # type: ignore[arg-type]
    return number if number >= LEAST else 0.0


def _items(read: Callable[[object], D], limit: int) -> Callable[[object], tuple[D, ...]]:
    return lambda value: tuple(map(read, value[:limit])) if isinstance(value, list) else ()


def _by_name(read: Callable[[object], D], limit: int) -> Callable[[object], dict[str, D]]:
    def read_all(value: object) -> dict[str, D]:
        pairs = islice(value.items(), limit) if isinstance(value, dict) else ()
        return {_text(name): read(each) for name, each in pairs}

    return read_all


def _record(kind: type[D]) -> Callable[[object], D]:
    readers = _readers(kind)

    def read(value: object) -> D:
        given = value if isinstance(value, dict) else {}
        return kind(**{name: reader(given[name]) for name, reader in readers.items() if name in given})

    return read


def _buckets(value: object) -> Buckets:
    read = _record(Buckets)(value)
    is_one = len(read.counts) == len(read.bounds) + 1 > 1 and list(read.bounds) == sorted(set(read.bounds))
    return read if is_one else Buckets()


def _readers(kind: type[Any]) -> dict[str, Callable[[object], Any]]:
    """How each field of a record is read, by its type."""
    known: dict[Any, Callable[[object], Any]] = {
        str: _text,
        bool: lambda value: value is True,
        int: lambda value: int(_number(value)),
        float: _number,
        tuple[float, ...]: _items(_number, MAX_BUCKETS),
        Mapping[str, float]: _by_name(_number, MAX_COUNTS),
    }
    if kind is Snapshot:
        known |= {
            Mapping[str, Buckets]: _by_name(_buckets, MAX_COUNTS),
            tuple[EngineView, ...]: _items(_record(EngineView), MAX_ENGINES),
            tuple[RequestView, ...]: _items(_record(RequestView), MAX_REQUESTS),
        }
    hints = get_type_hints(kind)
    return {item.name: known[hints[item.name]] for item in fields(kind)}
