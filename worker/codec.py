"""Bytes to plain data and back, bounded: msgpack and JSON as strangers may write them.

Relies on msgpack and json for the formats. Leaves the meaning of what was read to `worker/wire.py` (job bodies) and
`worker/frames.py` (frames and results). Decoded data is made of str, int, float, bool, None, list and dict alone, and

1. costs no more than `MAX_CONTAINERS` lists and maps, nested `MAX_DEPTH` deep, whatever the bytes say;
2. has one value per key: a repeated key is refused, because two readers would disagree about which one counts;
3. can be written again: no lone surrogate, no NaN or infinity, no integer beyond 64 bits.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgpack

MAX_DEPTH = 32
MAX_CONTAINERS = 65_536
"""Lists and maps in one body. An empty one costs a byte on the wire and 64 in memory."""
MAX_ITEMS = 1 << 20
"""Items of one list: token ids of the longest prompt."""

_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


class MalformedError(ValueError):
    """Bytes or data that break a rule above; one line that states the rule, without any of the content."""


def unpack(data: bytes, *, max_containers: int = MAX_CONTAINERS, max_items: int = MAX_ITEMS) -> object:
    """Read one msgpack value. `MalformedError` when it is cut short, followed by more, too deep, too large or an extension."""
    count = _counter(max_containers)
    try:
        value: object = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=lambda pairs: count(_unique(pairs)),
            list_hook=count,
            ext_hook=_no_extension,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=max_items,
            max_map_len=max_containers,
            max_ext_len=len(data),
        )
    except MalformedError:
        raise
    except msgpack.ExtraData:
        raise MalformedError("bytes follow the msgpack value; send one map and nothing else") from None
    except msgpack.StackError:
        raise MalformedError(f"nested deeper than {MAX_DEPTH}") from None
    except UnicodeDecodeError:
        raise MalformedError("text that is not UTF-8") from None
    except (msgpack.UnpackException, ValueError) as error:
        raise MalformedError(f"not one msgpack value: {str(error) or 'unknown format'}") from None
    return value


def parse_json(data: bytes) -> object:
    """Read one JSON value in UTF-8. `MalformedError` when it is not one, is too deep or too large, or repeats a key."""
    if _num_openings(data) > MAX_CONTAINERS and _num_openings(_JSON_STRING.sub(b"", data)) > MAX_CONTAINERS:
        raise MalformedError(f"more than {MAX_CONTAINERS} lists and maps")
    try:
        value: object = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except MalformedError:
        raise
    except RecursionError:
        raise MalformedError(f"nested deeper than {MAX_DEPTH}") from None
    except UnicodeDecodeError:
        raise MalformedError("text that is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise MalformedError(f"not one JSON value: wrong at character {error.pos}") from None
    except ValueError:
        raise MalformedError("an integer beyond 64 bits") from None
    return value


def pack(value: object) -> bytes:
    """Write `value` as msgpack. A lone surrogate would become `?`, so that none can leave whatever slipped in."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="replace")
    return packed


def check(value: object) -> None:
    """Raise `MalformedError` unless `value` keeps the rules above. Linear, without recursion."""
    pending: list[tuple[object, int]] = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise MalformedError(f"nested deeper than {MAX_DEPTH}")
        if type(item) is dict:
            if not all(type(key) is str for key in item):
                raise MalformedError("a map key that is not text")
            pending.extend((inner, depth + 1) for pair in item.items() for inner in pair)
        elif isinstance(item, (list, tuple)):
            if len(item) > MAX_ITEMS:
                raise MalformedError(f"a list of {len(item)} items, more than {MAX_ITEMS}")
            if set(map(type, item)) == {int}:  # the one long kind of list: a million ids without a million turns
                item = (min(item), max(item))
            pending.extend((inner, depth + 1) for inner in item)
        else:
            _check_scalar(item)


def has_lone_surrogate(text: str) -> bool:
    """Whether `text` cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _check_scalar(value: object) -> None:
    if type(value) is str:
        if has_lone_surrogate(value):
            raise MalformedError("text with a lone surrogate")
    elif type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise MalformedError("an integer beyond 64 bits")
    elif type(value) is float:
        if not math.isfinite(value):
            raise MalformedError("a number that is not finite")
    elif value is not None and type(value) is not bool:
        raise MalformedError(f"a value of type {type(value).__name__}; send text, numbers, booleans, null, lists and maps")


def _num_openings(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    pairs = list(pairs)
    value = dict(pairs)
    if len(value) < len(pairs):
        raise MalformedError("a key that stands twice in one map")
    return value


def _counter(limit: int) -> Callable[[Any], Any]:
    """A hook that passes containers through and counts them, so that a small body cannot grow into a large heap."""
    left = limit

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MalformedError(f"more than {limit} lists and maps")
        return container

    return count


def _no_extension(code: int, _data: bytes) -> NoReturn:
    raise MalformedError(f"msgpack extension type {code}")


def _no_constant(name: str) -> NoReturn:
    raise MalformedError(f"{name}, which is not JSON")
