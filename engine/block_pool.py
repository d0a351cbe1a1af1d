"""Which KV block is handed out, shared, kept for its contents or evicted: integer bookkeeping over the blocks of the KV cache.

Knows ids, reference counts and hashes only. The tensor they index lives in `kv_cache`; who gets blocks is decided in
`scheduler`, and when a shared one must be copied before it is written in `tables`.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks, each free or held; block 0 is the null block that pads tables and is never handed out.

    Invariants:
    1. used + free = num_blocks, and a block is free exactly when its reference count is 0.
    2. The reference count of a block is the number of block-table entries that name it.
    3. A hash names one block, whose contents are what the hash says, until the block is handed out again.
    4. Free blocks are handed out in this order: those without a hash, then the one that was given up longest ago; of one table
       the tail goes before what it depends on.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 1, f"num_blocks {num_blocks} is below 1"
        assert block_size >= 1, f"block_size {block_size} is below 1"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._ref_counts = [0] * (num_blocks + 1)
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._num_cached = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, with or without cached contents."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose contents can still be shared."""
        return self._num_cached

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by at least one table."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def num_holders(self, block_id: int) -> int:
        """How many tables name the block."""
        return self._ref_counts[block_id]

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one table names the block: it must not be written."""
        return self._ref_counts[block_id] > 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out `num_blocks` free blocks, one reference each. The caller has seen that they are free."""
        assert 0 <= num_blocks <= len(self._free), (
            f"allocate({num_blocks}) with {len(self._free)} free of {self.num_blocks} blocks"
        )
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            if block_id in self._hashes:
                del self._blocks[self._hashes.pop(block_id)]
                self._num_cached -= 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each block, held or cached; the null block has none."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if not self._ref_counts[block_id]:
                del self._free[block_id]
                self._num_cached -= 1
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block; those that nobody holds any more can be allocated again."""
        for block_id in reversed(block_ids):  # the tail of a chain is evicted first
            if block_id == NULL_BLOCK:
                continue
            assert self._ref_counts[block_id] > 0, f"block {block_id} is freed but not held"
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                self._free[block_id] = None
                if block_id in self._hashes:
                    self._num_cached += 1
                else:
                    self._free.move_to_end(block_id, last=False)

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Let others find a full block by the hash of what it holds. One of two equal blocks is found."""
        if block_hash not in self._blocks and block_id not in self._hashes:
            self._blocks[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def forget(self, block_ids: Iterable[int]) -> None:
        """Let nobody find these blocks any more: what they hold is not to be trusted."""
        for block_id in block_ids:
            if block_id in self._hashes:
                del self._blocks[self._hashes.pop(block_id)]
                self._num_cached -= not self._ref_counts[block_id]

    def find(self, block_hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known beginning of a chain of hashes."""
        found = []
        for block_hash in block_hashes:
            block_id = self._blocks.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_held(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks are held by some table: sharing them takes nothing from the free ones."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id])

    def repair(self) -> int:
        """Take every block back, for a caller who knows that no table is left; how many had been lost."""
        if not self.num_used_blocks:
            return 0
        lost = [block_id for block_id, count in enumerate(self._ref_counts) if count]
        for block_id in lost:
            self._ref_counts[block_id] = 1
        self.free(lost)
        return len(lost)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Audit the pool against every block table there is; AssertionError on a leak, a double use or a foreign block."""
        entries = Counter(block_id for table in tables for block_id in table if block_id != NULL_BLOCK)
        counts = {block_id: count for block_id, count in enumerate(self._ref_counts) if count}
        assert counts == entries, f"reference counts {counts} differ from table entries {dict(entries)}"
        assert len(counts) + len(self._free) == self.num_blocks, (
            f"{len(counts)} used + {len(self._free)} free != {self.num_blocks} blocks"
        )
        assert {*counts, *self._free} == set(range(1, self.num_blocks + 1)), (
            "a block is neither used nor free, or the null block is"
        )
        assert self._blocks == {block_hash: block_id for block_id, block_hash in self._hashes.items()}, "hashes differ"
        assert self._num_cached == len(self._hashes.keys() & self._free.keys()), "cached blocks are miscounted"


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], num_blocks: int, block_size: int, salt: bytes) -> None:
    """Append to the hashes of a sequence's first blocks until there are `num_blocks`: 128 bits each, chained.

    A hash covers its block's tokens and, by its parent, all before them; the first one covers `salt`, so that sequences of
    different salts never share. BLAKE2b, so that nobody can make two prompts collide.
    """
    parent = hashes[-1] if hashes else blake2b(salt, digest_size=16).digest()
    for index in range(len(hashes), num_blocks):
        tokens = array("I", token_ids[index * block_size : (index + 1) * block_size]).tobytes()
        parent = blake2b(tokens, digest_size=16, key=parent).digest()
        hashes.append(parent)
