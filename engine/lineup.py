"""Where every live sequence stands: waiting, running, or ended and holding on; and the slots that are taken.

Relies on `BlockTables`: who leaves a place gives back the blocks that it held there. Leaves to `scheduler` who takes which
place and when.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from engine.decision import Ended
from engine.sequence import Order, Sequence
from engine.tables import BlockTables

_order = attrgetter("order")


def _reverse_order(sequence: Sequence) -> Order:
    stamp, arrival, choice = sequence.order
    return -stamp, -arrival, -choice


class Lineup:
    """The sequences of one scheduler, in order.

    Invariants:
    1. Every live sequence is in exactly one of `running`, `waiting` and `ended`. The first two are sorted and end with the one
       that is taken next: the next to be preempted, the next to start. So a step never looks at what waits behind the head.
    2. `num_slots_taken` is the width of all that run, and one for each that has ended.
    """

    def __init__(self, max_slots: int, tables: BlockTables) -> None:
        self._max_slots = max_slots
        self._tables = tables
        self._live: dict[str, list[Sequence]] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.ended: list[Ended] = []
        """With request_level, those that have ended and hold their slots and blocks until the batch ends."""
        self.num_slots_taken = 0

    @property
    def held(self) -> list[Sequence]:
        """All that have a block table."""
        return [*self.running, *(end.sequence for end in self.ended)]

    @property
    def is_empty(self) -> bool:
        """Whether nothing lives."""
        return not self._live

    def live(self, request_id: str) -> list[Sequence]:
        """The choices of a request that live."""
        return self._live.get(request_id, [])

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn."""
        self._live.setdefault(sequence.request.request_id, []).append(sequence)
        insort(self.waiting, sequence, key=_reverse_order)

    def start_head(self) -> None:
        """Let the head of the waiting sequences run; it is to be given its blocks."""
        sequence = self.waiting.pop()
        insort(self.running, sequence, key=_order)
        self.num_slots_taken += sequence.width

    def stop(self, sequence: Sequence) -> None:
        """Take slot, blocks and reservation from a running sequence, which is to be put somewhere."""
        self._discard(sequence)
        self.num_slots_taken -= sequence.width
        self._tables.free(sequence)

    def wait_again(self, sequence: Sequence) -> None:
        """Put a sequence that was stopped back to its place among the waiting."""
        insort(self.waiting, sequence, key=_reverse_order)

    def narrow(self, root: Sequence) -> int:
        """Give up the slots that were kept for forks; how many slots that sequence had."""
        width, root.width = root.width, 1
        self.num_slots_taken -= width - 1
        return width

    def branch(self, parent: Sequence, choice: int) -> Sequence:
        """A running sequence that knows and shares what `parent` does."""
        child = self._tables.fork(parent, choice)
        self.num_slots_taken += 1
        self._live[parent.request.request_id].append(child)
        insort(self.running, child, key=_order)
        return child

    def place(self, request_id: str, place: tuple[float, int]) -> None:
        """Move a request to another place in order, with all its choices."""
        for sequence in self.live(request_id):
            sequence.order = (*place, sequence.choice)
        self.running.sort(key=_order)
        self.waiting.sort(key=_reverse_order)

    def hold(self, end: Ended) -> None:
        """A running sequence has ended and keeps a slot and its blocks until it is removed."""
        self._discard(end.sequence)
        self.narrow(end.sequence)
        self._tables.unreserve(end.sequence)
        self.ended.append(end)

    def remove(self, sequence: Sequence) -> bool:
        """Forget a sequence wherever it is, with all it holds; False when it is not there."""
        group = self.live(sequence.request.request_id)
        if sequence not in group:
            return False
        group.remove(sequence)
        if not group:
            del self._live[sequence.request.request_id]
        held = [end for end in self.ended if end.sequence is sequence]
        if held:
            self.ended.remove(held[0])
            self.num_slots_taken -= 1
            self._tables.free(sequence)
        elif sequence.block_table:
            self.stop(sequence)
        else:
            self._tables.free_host(sequence)
            self.waiting.remove(sequence)
        sequence.decode = None  # it names the sequence: a cycle would wait for the garbage collector
        return True

    def check(self) -> None:
        """Audit places, slots and tables; AssertionError names what is wrong."""
        held = self.held
        self._tables.check(held, self.waiting)
        assert self.num_slots_taken == sum(s.width for s in self.running) + len(self.ended) <= self._max_slots, (
            f"{self.num_slots_taken} slots of {self._max_slots} are taken"
        )
        assert self.running == sorted(self.running, key=_order), "running sequences are out of order"
        assert self.waiting == sorted(self.waiting, key=_reverse_order), "waiting sequences are out of order"
        live = [sequence for group in self._live.values() for sequence in group]
        assert len(live) == len(held) + len(self.waiting), "a sequence is in two places or in none"
        assert set(live) == {*held, *self.waiting}, "a live sequence is lost or a dead one is kept"

    def _discard(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones."""
        index = bisect_left(self.running, sequence.order, key=_order)
        assert self.running[index] is sequence, "a running sequence is not where its order says"
        del self.running[index]
