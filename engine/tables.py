"""What each sequence's block table holds: grown, shared, copied on write, given back, swapped out and in again.

Relies on `BlockPool` for the blocks themselves. Leaves to `scheduler` who gets them and gives way, to `reservation` how many
are set aside, and to `kv_cache` to move what `take_moves` names.

    block_table  [ null blocks: left the window | full blocks, found by hash | a partly filled tail ]
                 0                 num_released_blocks      num_indexed_blocks
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from engine.block_pool import NULL_BLOCK, BlockPool, extend_hashes
from engine.config import SchedulerConfig
from engine.decision import BlockMoves
from engine.sequence import Sequence
from engine.stats import KVCounts


class BlockTables:
    """The one writer of block tables, reservations and host blocks.

    Invariants:
    1. The blocks that are promised (`num_reserved_blocks` of the sequences) are free and given to nobody else.
    2. A block that more than one table names is not written: the writer copies it first.
    3. What a step decides is computed: a full block can be found from the decision on, and a later sequence of the same step
       may share it.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._num_reserved = 0
        self._free_host_blocks = list(range(config.num_host_blocks))
        self._swapped_out: list[tuple[int, int]] = []
        self._copied: list[tuple[int, int]] = []
        self._swapped_in: list[tuple[int, int]] = []

    @property
    def num_available(self) -> int:
        """Blocks that are free and promised to nobody."""
        return self._pool.num_free_blocks - self._num_reserved

    @property
    def num_held(self) -> int:
        """Blocks that are in tables or set aside."""
        return self._pool.num_used_blocks + self._num_reserved

    def take_moves(self) -> BlockMoves:
        """The moves decided since the last call."""
        moves = BlockMoves(self._swapped_out, self._copied, self._swapped_in)
        self._swapped_out, self._copied, self._swapped_in = [], [], []
        return moves

    # Starting

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold a beginning of the sequence already; one token at least is left to compute."""
        if not self._config.prefix_caching or sequence.num_released_blocks:
            return []
        num_blocks = (len(sequence.token_ids) - 1) // self._config.block_size
        self._hash(sequence, num_blocks)
        return self._pool.find(sequence.block_hashes[:num_blocks])

    def num_wanted(self, num_total: int, cached: Items[int]) -> int:
        """Free blocks that a sequence of `num_total` blocks takes when it shares `cached`, of which some may be free too."""
        return num_total - self._pool.num_held(cached)

    def start(self, sequence: Sequence, cached: list[int], num_tokens: int, num_total: int) -> None:
        """Give a waiting sequence the table for its next `num_tokens`, and set the rest of `num_total` blocks aside."""
        pool = self._pool
        sequence.num_computed_tokens = max(len(cached) * pool.block_size, sequence.num_computed_tokens)
        pool.share(cached)
        num_covered = pool.blocks_for(sequence.num_computed_tokens + num_tokens) - sequence.num_released_blocks
        new = pool.allocate(num_covered - len(cached))
        self._swapped_in += zip(sequence.host_blocks[len(cached) :], new, strict=False)
        self.free_host(sequence)
        sequence.block_table = [NULL_BLOCK] * sequence.num_released_blocks + cached + new
        sequence.num_reserved_blocks = num_total - num_covered
        self._num_reserved += sequence.num_reserved_blocks

    # Growing

    def num_missing(self, sequences: Items[Sequence], num_tokens: int) -> int:
        """Blocks that the next `num_tokens` of each take beside those set aside for them.

        Copies of shared tails included; who writes last to a tail needs none.
        """
        num_new = sum([self._pool.blocks_for(s.num_computed_tokens + num_tokens) - len(s.block_table) for s in sequences])
        tails = Counter([sequence.block_table[-1] for sequence in sequences if self._must_copy(sequence)])
        num_copies = sum([min(num, self._pool.num_holders(tail) - 1) for tail, num in tails.items()])
        return num_new + num_copies - min(num_new + num_copies, sum([s.num_reserved_blocks for s in sequences]))

    def grow(self, sequences: Items[Sequence], num_tokens: int) -> None:
        """Extend tables over the next `num_tokens` of each: copies on write, new blocks, and back goes what left the window."""
        num_free = self._pool.num_free_blocks
        for sequence in sequences:
            self._copy_tail(sequence)
            self.index_full_blocks(sequence)
            table = sequence.block_table
            table += self._pool.allocate(self._pool.blocks_for(sequence.num_computed_tokens + num_tokens) - len(table))
        num_taken = num_free - self._pool.num_free_blocks
        for sequence in sequences:
            num = min(num_taken, sequence.num_reserved_blocks)
            sequence.num_reserved_blocks -= num
            self._num_reserved -= num
            num_taken -= num
            self._release_window(sequence)

    def fork(self, parent: Sequence, choice: int) -> Sequence:
        """A copy of a running sequence that shares its blocks."""
        child = parent.fork(choice)
        self._pool.share(child.block_table)
        return child

    def divide_reserve(self, forks: Items[Sequence]) -> None:
        """Spread what was set aside for the first over all; whoever comes last writes to the shared tail and copies nothing."""
        left = forks[0].num_reserved_blocks
        for index, fork in enumerate(forks):
            fork.num_reserved_blocks = -(-left // (len(forks) - index))
            left -= fork.num_reserved_blocks

    def index_full_blocks(self, sequence: Sequence) -> None:
        """Let others find the blocks that are full, or will be after this step."""
        if not self._config.prefix_caching:
            return
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self._config.block_size
        if num_full > sequence.num_indexed_blocks:
            self._hash(sequence, num_full)
            for index in range(max(sequence.num_indexed_blocks, sequence.num_released_blocks), num_full):
                self._pool.cache(sequence.block_table[index], sequence.block_hashes[index])
            sequence.num_indexed_blocks = num_full

    # Giving back

    def free(self, sequence: Sequence) -> None:
        """Give back the table and what was set aside; full blocks can be found until they are handed out again."""
        self.index_full_blocks(sequence)
        self.unreserve(sequence)
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_indexed_blocks = 0
        sequence.shares_tail = False

    def reserve(self, sequence: Sequence, num_blocks: int) -> None:
        """Set more blocks aside for a running sequence; the caller has seen that they are available."""
        sequence.num_reserved_blocks += num_blocks
        self._num_reserved += num_blocks

    def forget(self, sequence: Sequence) -> None:
        """Let nobody share what the sequence has computed, from now on: it is broken."""
        self._pool.forget(sequence.block_table)
        sequence.num_indexed_blocks = len(sequence.block_table)

    def unreserve(self, sequence: Sequence) -> None:
        """Give back what was set aside."""
        self._num_reserved -= sequence.num_reserved_blocks
        sequence.num_reserved_blocks = 0

    def num_to_swap(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Host blocks that the first `num_tokens` positions take; None when there are not so many."""
        num_blocks = self._pool.blocks_for(num_tokens) - sequence.num_released_blocks
        return num_blocks if 0 < num_blocks <= len(self._free_host_blocks) else None

    def swap_out(self, sequence: Sequence, num_blocks: int) -> None:
        """Copy the first blocks in the window to host memory; `free` gives them back."""
        first = sequence.num_released_blocks
        sequence.host_blocks = [self._free_host_blocks.pop() for _ in range(num_blocks)]
        self._swapped_out += zip(sequence.block_table[first : first + num_blocks], sequence.host_blocks, strict=True)

    def free_host(self, sequence: Sequence) -> None:
        """Give back the host blocks. Those of one step's swaps in are not swapped to before the next step."""
        self._free_host_blocks += reversed(sequence.host_blocks)
        sequence.host_blocks = []

    def repair(self) -> int:
        """Put right what should never be wrong, when no sequence is left; how many blocks had been lost."""
        self._num_reserved = 0
        if len(self._free_host_blocks) != self._config.num_host_blocks:
            self._free_host_blocks = list(range(self._config.num_host_blocks))
        return self._pool.repair()

    # Counting

    def counts(self, held: Items[Sequence]) -> KVCounts:
        """Blocks and positions as they are now; `held`: all sequences with a table."""
        pool, block_size = self._pool, self._config.block_size
        unfilled = sum([len(s.block_table) * block_size - s.num_computed_tokens for s in held])
        tails = [(s.block_table[-1], -s.num_computed_tokens % block_size) for s in held if s.shares_tail]
        unfilled -= sum(num for _, num in tails) - sum(dict(tails).values())  # a shared tail counts once
        return KVCounts(
            capacity_blocks=pool.num_blocks,
            used_blocks=pool.num_used_blocks,
            cached_blocks=pool.num_cached_blocks,
            free_blocks=pool.num_free_blocks - pool.num_cached_blocks,
            allocated_tokens=self.num_held * block_size,
            filled_tokens=pool.num_used_blocks * block_size - unfilled,
        )

    def check(self, held: Items[Sequence], waiting: Items[Sequence]) -> None:
        """Audit tables, reservations and host blocks; AssertionError names what is wrong."""
        for sequence in held:
            name, num_tokens = sequence.request.request_id, sequence.num_computed_tokens
            assert len(sequence.block_table) == self._pool.blocks_for(num_tokens) > 0, (
                f"request {name} holds {len(sequence.block_table)} blocks for {num_tokens} tokens"
            )
            assert not sequence.host_blocks, f"request {name} runs and has blocks in host memory"
            released = sequence.block_table[: sequence.num_released_blocks]
            assert not any(released), f"request {name} holds blocks that have left its window"
            assert NULL_BLOCK not in sequence.block_table[len(released) :], f"request {name} lacks a block"
        for sequence in waiting:
            name, num_host = sequence.request.request_id, len(sequence.host_blocks)
            assert not sequence.block_table, f"request {name} waits and holds blocks"
            assert not sequence.num_reserved_blocks, f"request {name} waits and has blocks reserved"
            num_tokens = sequence.num_computed_tokens
            assert num_host == (self._pool.blocks_for(num_tokens) - sequence.num_released_blocks if num_tokens else 0), (
                f"request {name} waits with {num_tokens} computed tokens in {num_host} host blocks"
            )
        self._pool.check(sequence.block_table for sequence in held)
        assert self._num_reserved == sum(s.num_reserved_blocks for s in held) <= self._pool.num_free_blocks, (
            f"{self._num_reserved} blocks are reserved, {self._pool.num_free_blocks} are free"
        )
        self._check_host(block for sequence in waiting for block in sequence.host_blocks)

    def _check_host(self, used: Iterable[int]) -> None:
        blocks = sorted([*self._free_host_blocks, *used])
        assert blocks == list(range(self._config.num_host_blocks)), "a host block is lost or held twice"

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        salt = sequence.request.cache_salt
        extend_hashes(sequence.block_hashes, sequence.token_ids, num_blocks, self._config.block_size, salt)

    def _must_copy(self, sequence: Sequence) -> bool:
        is_partial = sequence.num_computed_tokens % self._config.block_size > 0
        return sequence.shares_tail and is_partial and self._pool.is_shared(sequence.block_table[-1])

    def _copy_tail(self, sequence: Sequence) -> None:
        """Copy on write."""
        if self._must_copy(sequence):
            (copy,) = self._pool.allocate(1)
            self._copied.append((sequence.block_table[-1], copy))
            self._pool.free(sequence.block_table[-1:])
            sequence.block_table[-1] = copy
        sequence.shares_tail = False

    def _release_window(self, sequence: Sequence) -> None:
        """Give back the blocks that no position from the next on looks back to."""
        if self._config.sliding_window is None:
            return
        first_key = sequence.num_computed_tokens - self._config.sliding_window + 1
        num_left = max(first_key, 0) // self._config.block_size
        if num_left > sequence.num_released_blocks:
            left = sequence.block_table[sequence.num_released_blocks : num_left]
            self._pool.free(left)
            sequence.block_table[sequence.num_released_blocks : num_left] = [NULL_BLOCK] * len(left)
            sequence.num_released_blocks = num_left
