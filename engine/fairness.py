"""Who comes first among requests of several priorities and tenants.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) on admissions: a request is stamped once, when it arrives, and requests are
served in the order of their stamps. The scheduler keeps its lists in that order and tells what it has admitted.

1. Of one tenant and priority the earlier goes first.
2. Tenants that have requests waiting are admitted in proportion to their weights, however many each has sent.
3. Priority is a head start: a waiting request is overtaken by at most `aging` requests of one tenant for each priority above
   its own, so nothing starves.
"""

from heapq import nlargest
from operator import itemgetter

from engine.request import Request

_MAX_FLOWS = 1024
"""Tenants and priorities that are remembered. Those whose turn is nearest are forgotten first: they lose or gain little."""


class FairShare:
    """Stamps requests. Pure arithmetic: its time is counted in admissions."""

    def __init__(self, aging: int) -> None:
        self._aging = aging
        self._now = 0.0
        self._next: dict[tuple[int, int], float] = {}

    def stamp(self, request: Request, width: int) -> float:
        """When the request is due; it counts as `width` admissions of its tenant."""
        flow = request.tenant, request.priority
        start = max(self._now, self._next.get(flow, 0.0))
        self._next[flow] = start + width / request.weight
        if len(self._next) > _MAX_FLOWS:
            self._next = dict(nlargest(_MAX_FLOWS // 2, self._next.items(), key=itemgetter(1)))
        return start + request.priority * self._aging

    def admitted(self, stamp: float, priority: int) -> None:
        """A request with this stamp starts: whoever arrives from now on is not due before it."""
        self._now = max(self._now, stamp - priority * self._aging)
