"""Which KV block is handed out: integer bookkeeping over the blocks of the KV cache.

Knows ids and reference counts only. The tensor they index lives in `kv_cache`; who gets blocks is decided in `scheduler`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 1..num_blocks, each free or held; block 0 is the null block that pads tables and is never handed out.

    Invariants:
    1. used + free = num_blocks, and a block is free exactly when its reference count is 0.
    2. The reference count of a block is the number of block-table entries that name it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 1, f"num_blocks {num_blocks} is below 1"
        assert block_size >= 1, f"block_size {block_size} is below 1"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks, 0, -1))  # a stack
        self._ref_counts = [0] * (num_blocks + 1)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by at least one table."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out `num_blocks` free blocks, one reference each. The caller has seen that they are free."""
        assert 0 <= num_blocks <= len(self._free), (
            f"allocate({num_blocks}) with {len(self._free)} free of {self.num_blocks} blocks"
        )
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block; those that nobody holds any more can be allocated again."""
        for block_id in reversed(block_ids):  # the first block of a table is the first to be handed out again
            assert self._ref_counts[block_id] > 0, f"block {block_id} is freed but not held"
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                self._free.append(block_id)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Audit the pool against every block table there is; AssertionError on a leak, a double use or a foreign block."""
        entries = Counter(block_id for table in tables for block_id in table)
        counts = {block_id: count for block_id, count in enumerate(self._ref_counts) if count}
        assert counts == entries, f"reference counts {counts} differ from table entries {dict(entries)}"
        assert len(counts) + len(self._free) == self.num_blocks, (
            f"{len(counts)} used + {len(self._free)} free != {self.num_blocks} blocks"
        )
        assert {*counts, *self._free} == set(range(1, self.num_blocks + 1)), (
            "a block is neither used nor free, or the null block is"
        )
