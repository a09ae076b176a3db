import pytest

from engine.cache.block_pool import BlockPool


def test_allocated_blocks_are_distinct_and_counted() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(3)
    assert len(set(taken)) == 3
    assert pool.num_free_blocks == 1
    assert [pool.num_refs(block_id) for block_id in taken] == [1, 1, 1]


def test_shared_block_is_free_when_its_last_user_leaves() -> None:
    pool = BlockPool(2)
    taken = pool.allocate(1)
    pool.touch(taken)
    pool.free(taken)
    assert pool.num_free_blocks == 1
    pool.free(taken)
    assert pool.num_free_blocks == 2


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(1)
    taken = pool.allocate(1)
    pool.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(taken)


def test_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_free_block_keeps_its_content_until_it_is_reused() -> None:
    pool = BlockPool(1)
    taken = pool.allocate(1)
    pool.remember(taken[0], b"x", None)
    pool.free(taken)
    assert pool.find(b"x") == taken[0]
    pool.allocate(1)
    assert pool.find(b"x") is None


def test_touch_brings_a_free_block_back_into_use() -> None:
    pool = BlockPool(2)
    taken = pool.allocate(1)
    pool.remember(taken[0], b"x", None)
    pool.free(taken)
    pool.touch(taken)
    assert pool.num_free_blocks == 1
    assert pool.allocate(1) != taken


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, plain, last = pool.allocate(3)
    pool.remember(cached, b"x", None)
    for block_id in (cached, last, plain):
        pool.free([block_id])
    assert pool.allocate(2) == [plain, last]
    assert pool.find(b"x") == cached


def test_least_recently_used_cached_block_is_reused_first() -> None:
    pool = BlockPool(2)
    old, new = pool.allocate(2)
    pool.remember(old, b"old", None)
    pool.remember(new, b"new", None)
    pool.free([old])
    pool.free([new])
    pool.touch([old])
    pool.free([old])
    assert pool.allocate(1) == [new]


def test_end_of_a_prefix_is_reused_before_its_start() -> None:
    pool = BlockPool(2)
    start, end = pool.allocate(2)
    pool.remember(start, b"start", None)
    pool.remember(end, b"end", None)
    pool.free([start, end])
    assert pool.allocate(1) == [end]


def test_first_of_two_blocks_with_equal_content_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.remember(first, b"x", None)
    pool.remember(second, b"x", None)
    assert pool.find(b"x") == first
    assert pool.num_cached_blocks == 1


def test_dropping_an_adapter_forgets_its_blocks_only() -> None:
    pool = BlockPool(4)
    of_a, used_by_a, of_b, of_base = pool.allocate(4)
    for block_id, name, digest in (
        (of_base, b"base", None),
        (of_a, b"a", "a"),
        (used_by_a, b"a2", "a"),
        (of_b, b"b", "b"),
    ):
        pool.remember(block_id, name, digest)
    for block_id in (of_base, of_b, of_a):
        pool.free([block_id])

    assert pool.drop_adapter("a") == 2
    assert pool.find(b"a") is None
    assert pool.find(b"a2") is None
    assert pool.find(b"b") == of_b
    assert pool.find(b"base") == of_base
    assert pool.num_refs(used_by_a) == 1
    assert pool.allocate(1) == [of_a]
    assert pool.drop_adapter("a") == 0


def test_reused_block_no_longer_belongs_to_its_adapter() -> None:
    pool = BlockPool(1)
    taken = pool.allocate(1)
    pool.remember(taken[0], b"a", "a")
    pool.free(taken)
    pool.remember(pool.allocate(1)[0], b"b", "b")
    assert pool.drop_adapter("a") == 0
    assert pool.find(b"b") == taken[0]
