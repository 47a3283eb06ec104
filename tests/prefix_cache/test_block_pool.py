import pytest

from prefix_cache.block_pool import BlockPool, IntegrityError, PoolExhausted
from prefix_cache.events import AllCleared, BlocksRemoved, BlocksStored
from prefix_cache.hashing import block_digests, split_digests

ROOT = b"r" * 16


def digests_of(tokens, block_size=4):
    return block_digests(tokens, ROOT, block_size)


def publish_sequence(pool, tokens):
    """Allocates, publishes and returns the table of a sequence of whole blocks."""
    digests = digests_of(tokens, pool.block_size)
    return pool.publish(pool.allocate(len(digests)), digests, ROOT)


def test_a_fresh_pool_hands_out_its_blocks_in_order():
    pool = BlockPool(4, 4)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (1, 0, 3)
    pool.check_integrity({0: 1, 1: 1, 2: 1})


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4, 4)
    pool.allocate(3)
    with pytest.raises(PoolExhausted, match="2 blocks asked for, 1 of 4 available"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_freed_blocks_without_a_digest_are_free_and_with_one_cached():
    pool = BlockPool(4, 4)
    table = publish_sequence(pool, range(8)) + pool.allocate(1)
    pool.free(table)
    assert (pool.num_free, pool.num_cached) == (2, 2)
    assert pool.lookup(digests_of(range(8))) == table[:2]
    pool.check_integrity({})


def test_lookup_stops_at_the_first_block_that_is_not_there():
    pool = BlockPool(4, 4)
    table = publish_sequence(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.lookup(digests_of([1, 2, 3, 4, 9, 9, 9, 9])) == table[:1]
    assert pool.lookup(digests_of([9, 2, 3, 4, 5, 6, 7, 8])) == []


def test_the_tail_of_a_sequence_is_evicted_first_and_the_eldest_sequence_before_the_younger():
    pool = BlockPool(4, 4)
    first = publish_sequence(pool, range(8))
    second = publish_sequence(pool, range(100, 108))
    pool.free(first)
    pool.free(second)
    assert pool.allocate(3) == [first[1], first[0], second[1]]
    assert pool.lookup(digests_of(range(100, 108))) == second[:1]


def test_touching_a_cached_block_takes_it_out_of_eviction():
    pool = BlockPool(2, 4)
    table = publish_sequence(pool, range(8))
    pool.free(table)
    assert pool.unreferenced(table) == 2
    pool.touch(table[:1])
    assert pool.unreferenced(table) == 1
    assert pool.allocate(1) == [table[1]]
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    pool.check_integrity({0: 1, 1: 1})


def test_superseded_blocks_go_before_older_ones_the_tail_first():
    pool = BlockPool(6, 4)
    old = publish_sequence(pool, range(8))
    rewritten = publish_sequence(pool, range(100, 112))
    pool.free(old)
    pool.free(rewritten)
    digests = digests_of(range(100, 112))
    assert pool.supersede([b"unknown digest..", *digests[1:]]) == 2
    # One is free; then the rewritten history's tail, and only then what is oldest.
    assert pool.allocate(5) == [5, rewritten[2], rewritten[1], old[1], old[0]]
    assert pool.lookup(digests) == rewritten[:1]


def test_a_superseded_block_in_use_goes_first_once_it_is_left_unless_somebody_asks_for_it():
    pool = BlockPool(4, 4)
    older = publish_sequence(pool, range(4))
    running = publish_sequence(pool, range(100, 112))
    assert pool.supersede(digests_of(range(100, 112))) == 3
    pool.free(older)
    # A second sequence begins with the first block, so that one is like any other again.
    pool.touch(running[:1])
    pool.check_integrity({older[0]: 0, **dict.fromkeys(running[1:], 1), running[0]: 2})
    pool.free(running)
    pool.free(running[:1])
    assert pool.allocate(4) == [running[2], running[1], older[0], running[0]]
    pool.check_integrity()


def test_a_free_block_cannot_be_touched_freed_or_published():
    pool = BlockPool(2, 4)
    with pytest.raises(IntegrityError, match="free and cannot be shared"):
        pool.touch([0])
    with pytest.raises(IntegrityError, match="given back more often"):
        pool.free([0])
    with pytest.raises(IntegrityError, match="nobody refers to it"):
        pool.publish([0], [b"d" * 16], ROOT)


def test_content_computed_twice_ends_in_one_block():
    pool = BlockPool(8, 4)
    digests = digests_of(range(12))
    first, second = pool.allocate(3), pool.allocate(3)
    assert pool.publish(first[:2], digests[:2], ROOT) == first[:2]
    held = pool.publish(second, digests, ROOT)
    assert held == [*first[:2], second[2]]
    assert pool.references(first[0]) == 2
    assert pool.num_free == 4
    assert pool.take_events() == [
        BlocksStored(b"".join(digests[:2]), ROOT),
        BlocksStored(digests[2], digests[1]),
    ]
    pool.check_integrity({first[0]: 2, first[1]: 2, first[2]: 1, second[2]: 1})


def test_publishing_content_of_a_cached_block_brings_that_block_back():
    pool = BlockPool(4, 4)
    table = publish_sequence(pool, range(4))
    pool.free(table)
    again = pool.allocate(1)
    assert again != table
    assert pool.publish(again, digests_of(range(4)), ROOT) == table
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (3, 0, 1)


def test_a_block_has_one_digest():
    pool = BlockPool(4, 4)
    table = publish_sequence(pool, range(4))
    with pytest.raises(IntegrityError, match="another digest"):
        pool.publish(table, digests_of(range(10, 14)), ROOT)


def test_copy_on_write_leaves_the_shared_block_to_the_others():
    pool = BlockPool(2, 4)
    (shared,) = pool.allocate(1)
    assert not pool.is_shared(shared)
    pool.touch([shared])
    assert pool.is_shared(shared)
    private = pool.copy_on_write(shared)
    assert private != shared
    assert (pool.references(shared), pool.references(private)) == (1, 1)
    pool.touch([shared])
    with pytest.raises(PoolExhausted):
        pool.copy_on_write(shared)
    assert pool.references(shared) == 2


def test_events_tell_what_was_stored_and_evicted_in_order():
    pool = BlockPool(2, 4)
    digests = digests_of(range(8))
    pool.free(publish_sequence(pool, range(8)))
    pool.allocate(2)
    stored, removed = pool.take_events()
    assert stored == BlocksStored(b"".join(digests), ROOT)
    assert isinstance(removed, BlocksRemoved)
    assert split_digests(removed.digests) == [digests[1], digests[0]]
    assert pool.take_events() == []
    assert pool.snapshot() == b""


def test_clear_forgets_everything_and_keeps_what_is_referenced():
    pool = BlockPool(4, 4)
    pool.free(publish_sequence(pool, range(8)))
    held = publish_sequence(pool, range(50, 54))
    pool.take_events()
    pool.clear()
    assert pool.take_events() == [AllCleared()]
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (3, 0, 1)
    assert pool.lookup(digests_of(range(50, 54))) == []
    pool.check_integrity({held[0]: 1})
    pool.free(held)
    assert pool.num_free == 4


def test_a_table_may_name_a_block_twice():
    pool = BlockPool(4, 4)
    first, second = publish_sequence(pool, range(8))
    pool.free([first, second])
    pool.touch([first, second, first])
    pool.check_integrity({first: 2, second: 1})
    pool.free([second, first, first])
    assert list(pool._policy) == [first, second]
    pool.check_integrity({})


def test_a_table_with_one_reference_too_many_changes_nothing():
    pool = BlockPool(4, 4)
    first, second = publish_sequence(pool, range(8))
    pool.free([second])
    for table in ([first, second], [first, first]):
        with pytest.raises(IntegrityError, match="given back more often than it was taken"):
            pool.free(table)
        pool.check_integrity({first: 1})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free list twice"),
        (lambda pool: pool._free.pop(), "must be free, cached or referenced"),
        (lambda pool: pool._references.__setitem__(pool._free[0], 1), "must be free, cached or referenced"),
        (lambda pool: pool._names._digests.__setitem__(pool._free[0], b"x" * 16), "free but still has a digest"),
        (lambda pool: pool._names._blocks.__setitem__(b"y" * 16, 0), "does not carry it"),
        (lambda pool: pool._names.has.__setitem__(0, False), "block 0 carries=False a digest"),
        (lambda pool: pool._names._high.__setitem__(1, 7), "block 1 has another digest in the arrays"),
        (lambda pool: pool._superseded.__setitem__(0, True), "block 0 waits to be given up first"),
        (lambda pool: pool._policy.pop_all(1), "must be free, cached or referenced"),
    ],
)
def test_integrity_check_finds_damaged_books(damage, message):
    pool = BlockPool(6, 4)
    pool.free(publish_sequence(pool, range(8)))
    pool.check_integrity({})
    damage(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()


def test_integrity_check_finds_a_leaked_reference():
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    with pytest.raises(IntegrityError, match="1 references but is held 0 times"):
        pool.check_integrity({table[0]: 1})


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 16)])
def test_a_pool_needs_blocks(blocks, size):
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(blocks, size)
