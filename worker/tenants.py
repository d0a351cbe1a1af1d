"""Tenants as the engine knows them: a small number, a weight, and a salt for the cache where tenants are kept apart.

Pure. A number means the same tenant for as long as it is among the last `MAX_TENANTS` seen; then the next newcomer has it.
"""

from collections import OrderedDict
from collections.abc import Mapping

MAX_TENANTS = 4096


class Tenants:
    """Numbers for the names that come by. Used by one thread."""

    def __init__(self, weights: Mapping[str, float], *, are_isolated: bool = False) -> None:
        """`weights`: shares of the engine, 1 for who is not named. `are_isolated`: none finds another's prefixes cached."""
        self._weights = weights
        self._are_isolated = are_isolated
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def number(self, name: str | None) -> int:
        """0 is nobody in particular."""
        if not name:
            return 0
        if name not in self._numbers:
            is_full = len(self._numbers) >= MAX_TENANTS
            self._numbers[name] = self._numbers.popitem(last=False)[1] if is_full else len(self._numbers) + 1
        self._numbers.move_to_end(name)
        return self._numbers[name]

    def weight(self, name: str | None) -> float:
        """Its share of the engine, against 1."""
        return self._weights.get(name or "", 1.0)

    def cache_salt(self, name: str | None) -> bytes:
        """Only requests of the same salt share cached prefixes."""
        return (name or "").encode() if self._are_isolated else b""
