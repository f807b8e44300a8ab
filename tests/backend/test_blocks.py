"""The block pool: conservation, holders, and the order of reuse."""

import pytest

from fullbore_backend.scheduler import BlockPool


def test_a_fresh_pool_is_all_free_and_handed_out_in_order() -> None:
    pool = BlockPool(4)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (4, 0, 0)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (1, 3)
    assert [pool.num_holders(block) for block in range(4)] == [1, 1, 1, 0]


def test_allocating_nothing_changes_nothing() -> None:
    pool = BlockPool(1)
    assert pool.allocate(0) == []
    assert pool.num_free == 1


def test_allocating_more_than_is_free_is_a_bug_of_the_caller() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.allocate(3)


def test_releasing_more_often_than_held_is_a_bug_of_the_caller() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = pool.allocate(2)
    for block in cached:
        pool.keep(block)
    blank = pool.allocate(2)
    pool.release(cached)
    pool.release(blank)
    assert pool.free_order() == (2, 3, 1, 0)
    assert pool.num_cached == 2


def test_the_tail_of_a_chain_is_reused_before_its_start() -> None:
    pool = BlockPool(3)
    chain = pool.allocate(3)
    for block in chain:
        pool.keep(block)
    pool.release(chain)
    assert pool.allocate(2) == [2, 1]


def test_cached_blocks_are_reused_least_recently_freed_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.keep(block)
    for block in (1, 2, 0):
        pool.release([block])
    pool.share(1)
    pool.release([1])
    assert pool.free_order() == (2, 0, 1)


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.keep(block)
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert (pool.num_free, pool.num_cached) == (2, 1)
    pool.share(block)
    assert (pool.num_free, pool.num_cached, pool.num_holders(block)) == (1, 0, 1)


def test_only_kept_content_is_shared_and_only_held_content_kept() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        pool.keep(0)
    [block] = pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.share(block)


def test_reuse_of_kept_content_is_told_once_and_only_at_allocation() -> None:
    pool = BlockPool(2)
    told: list[int] = []
    pool.on_reuse = told.append
    blocks = pool.allocate(2)
    pool.keep(1)
    pool.release(blocks)
    assert told == []
    assert pool.allocate(2) == [0, 1]
    assert told == [1]
    assert not pool.is_kept(1)


def test_reuse_of_kept_content_that_nobody_listens_for() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.keep(0)
    pool.release(blocks)
    assert pool.allocate(1) == [0]


def test_forgotten_content_is_reused_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.keep(block)
    pool.forget(2)  # while it is held
    pool.release(blocks)
    assert pool.free_order() == (2, 1, 0)
    pool.forget(0)  # while it is free
    assert pool.free_order() == (0, 2, 1)
    assert pool.num_cached == 1
    pool.forget(0)
    assert pool.num_cached == 1
