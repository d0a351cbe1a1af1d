"""The block pool hands out each block once, keeps contents as long as it can, and can be audited."""

from collections import OrderedDict

import pytest

from engine.block_pool import NULL_BLOCK, BlockPool, extend_hashes


def test_all_blocks_but_the_null_block_are_handed_out_once() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)

    block_ids = pool.allocate(2) + pool.allocate(3)

    assert sorted(block_ids) == [1, 2, 3, 4, 5]
    assert (pool.num_used_blocks, pool.num_free_blocks) == (5, 0)


def test_freed_blocks_are_handed_out_again() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    table = pool.allocate(3)

    pool.free(table[:2])

    assert sorted(pool.allocate(2)) == sorted(table[:2])
    pool.check([table])


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_partly_filled_block_counts_whole(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(num_blocks=3, block_size=4).blocks_for(num_tokens) == num_blocks


def test_more_than_is_free_is_never_handed_out() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    pool.allocate(2)

    with pytest.raises(AssertionError, match=r"allocate\(2\) with 1 free of 3 blocks"):
        pool.allocate(2)


def test_freeing_a_block_twice_is_an_error() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    table = pool.allocate(1)
    pool.free(table)

    with pytest.raises(AssertionError, match="freed but not held"):
        pool.free(table)


def test_the_null_block_is_neither_freed_nor_shared() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    (block,) = pool.allocate(1)

    pool.share([NULL_BLOCK, block])
    pool.free([NULL_BLOCK, block])

    assert (pool.num_holders(NULL_BLOCK), pool.num_holders(block), pool.num_free_blocks) == (0, 1, 2)
    pool.check([[NULL_BLOCK, block]])


@pytest.mark.parametrize(
    "tables",
    [[[1, 2]], [[1, 2], [3], [3]], [[1, 2], [0]], [[1, 2], [4]], []],
    ids=["leaked", "in two tables", "null block", "never handed out", "all leaked"],
)
def test_the_audit_finds_tables_that_differ_from_what_was_handed_out(tables: list[list[int]]) -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    assert [pool.allocate(2), pool.allocate(1)] == [[1, 2], [3]]
    pool.check([[1, 2], [3]])

    with pytest.raises(AssertionError, match="reference counts"):
        pool.check(tables)


def test_the_audit_finds_a_block_that_is_neither_used_nor_free() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    pool._free.popitem()

    with pytest.raises(AssertionError, match="0 used \\+ 3 free != 4 blocks"):
        pool.check([])


def test_the_audit_finds_a_block_that_is_free_twice() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    del pool._free[1]
    pool._free[NULL_BLOCK] = None

    with pytest.raises(AssertionError, match="neither used nor free, or the null block is"):
        pool.check([])


# Sharing and eviction


def hashes_of(token_ids: list[int], salt: bytes = b"", block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, len(token_ids) // block_size, block_size, salt)
    return hashes


def cached_table(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    table = pool.allocate(len(hashes))
    for block, block_hash in zip(table, hashes, strict=True):
        pool.cache(block, block_hash)
    return table


def test_a_shared_block_is_free_when_its_last_holder_gives_it_up() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    table = pool.allocate(1)
    pool.share(table)
    assert pool.is_shared(table[0])

    pool.free(table)
    assert (pool.num_free_blocks, pool.is_shared(table[0])) == (1, False)
    pool.free(table)

    assert pool.num_free_blocks == 2


def test_a_free_block_with_contents_is_found_and_taken_back() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    hashes = hashes_of([*range(8)])
    table = cached_table(pool, hashes)
    pool.free(table)
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (3, 2)

    found = pool.find(hashes)
    assert (found, pool.num_held(found)) == (table, 0)
    pool.share(found)

    assert (pool.num_free_blocks, pool.num_cached_blocks, pool.num_held(found)) == (1, 0, 2)
    pool.check([found])


def test_blocks_without_contents_are_handed_out_before_any_that_may_be_found() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    table = cached_table(pool, hashes_of([*range(8)]))
    other = pool.allocate(2)
    pool.free(table)
    pool.free(other)

    assert set(pool.allocate(2)) == set(other)


def test_what_was_given_up_longest_ago_is_evicted_first_and_a_use_makes_it_young() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    tables = [cached_table(pool, hashes_of([number] * 4)) for number in range(3)]
    for table in tables:
        pool.free(table)
    pool.share(tables[0])
    pool.free(tables[0])

    assert pool.allocate(3) == [*tables[1], *tables[2], *tables[0]]


def test_the_tail_of_a_chain_is_evicted_before_what_it_depends_on() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    hashes = hashes_of([*range(12)])
    table = cached_table(pool, hashes)
    pool.free(table)

    assert pool.allocate(1) == table[2:]
    assert pool.find(hashes) == table[:2]


def test_a_block_that_is_handed_out_is_not_found_any_more() -> None:
    pool = BlockPool(num_blocks=1, block_size=4)
    hashes = hashes_of([*range(4)])
    pool.free(cached_table(pool, hashes))

    table = pool.allocate(1)

    assert (pool.find(hashes), pool.num_cached_blocks) == ([], 0)
    pool.check([table])


def test_a_stale_tail_is_never_found() -> None:
    """The head of a chain was evicted and its tail is still there: without the head nobody may use it."""
    pool = BlockPool(num_blocks=4, block_size=4)
    hashes = hashes_of([*range(8)])
    table = cached_table(pool, hashes)
    pool.free(table[:1])
    pool.free(table[1:])
    pool._free = OrderedDict.fromkeys([table[0], *(block for block in pool._free if block != table[0])])
    pool.allocate(1)

    assert pool.find(hashes[1:]) == table[1:]
    assert pool.find(hashes) == []


def test_of_two_blocks_with_equal_contents_the_first_is_found_and_the_second_is_not_kept() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    hashes = hashes_of([*range(4)])
    first, second = cached_table(pool, hashes), cached_table(pool, hashes)

    assert pool.find(hashes) == first
    pool.free([*first, *second])
    assert pool.num_cached_blocks == 1
    pool.check([])


def test_a_block_keeps_its_first_hash() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    first, other = hashes_of([1] * 4)[0], hashes_of([2] * 4)[0]
    (block,) = pool.allocate(1)
    pool.cache(block, first)

    pool.cache(block, other)

    assert (pool.find([first]), pool.find([other])) == ([block], [])


def test_hashes_have_128_bits_and_depend_on_all_tokens_before() -> None:
    one, two = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([1, 2, 3, 9, 5, 6, 7, 8])

    assert [len(block_hash) for block_hash in one] == [16, 16]
    assert not set(one) & set(two)
    assert len({*hashes_of([5] * 12)}) == 3


def test_two_salts_never_share() -> None:
    token_ids = [*range(12)]

    assert not set(hashes_of(token_ids, b"canary")) & set(hashes_of(token_ids, b"")) & set(hashes_of(token_ids, b"canarz"))
    assert not set(hashes_of(token_ids, b"canary")) & set(hashes_of(token_ids, b""))
    assert hashes_of(token_ids, b"canary") == hashes_of(token_ids, b"canary")


def test_hashes_are_the_same_in_one_go_and_in_pieces() -> None:
    pieces: list[bytes] = []
    for count in (1, 1, 3):
        extend_hashes(pieces, [*range(12)], count, 4, b"a")

    assert pieces == hashes_of([*range(12)], b"a")
