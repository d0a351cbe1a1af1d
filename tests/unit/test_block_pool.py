"""The block pool hands out each block once and can be audited."""

import pytest

from engine.block_pool import BlockPool


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


def test_the_null_block_cannot_be_freed() -> None:
    with pytest.raises(AssertionError, match="block 0 is freed but not held"):
        BlockPool(num_blocks=3, block_size=4).free([0])


@pytest.mark.parametrize(
    "tables",
    [[[1, 2]], [[1, 2], [3], [3]], [[1, 2], [3], [0]], [[1, 2], [4]], []],
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
    pool._free.pop()

    with pytest.raises(AssertionError, match="0 used \\+ 3 free != 4 blocks"):
        pool.check([])


def test_the_audit_finds_a_block_that_is_free_twice() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    pool._free[0] = pool._free[1]

    with pytest.raises(AssertionError, match="neither used nor free"):
        pool.check([])
