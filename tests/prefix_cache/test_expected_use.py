"""The order in which a device gives blocks up, against a list that is sorted anew each time (naive_order)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from prefix_cache.block_pool import BlockPool
from prefix_cache.eviction import LRUPolicy
from prefix_cache.expected_use import ExpectedUsePolicy
from prefix_cache.hashing import chain_digest
from prefix_cache.worth import IDLE, PINNED, SUPERSEDED, WAITING
from tests.prefix_cache.naive_order import CheckedPolicy, NaiveOrder

BLOCKS = 8


some = st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS)
actions = st.tuples(
    st.sampled_from(["add", "add", "remove", "mark", "mark", "mark", "supersede", "pop", "pop below", "wait", "forget"]),
    some,
    st.sampled_from([SUPERSEDED, IDLE, WAITING, WAITING, PINNED]),
    st.integers(0, 4),
    st.integers(0, 2),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(actions, max_size=60))
def test_it_is_the_sorted_order(history):
    now = [100.0]
    naive = NaiveOrder(lambda: now[0])
    policy = CheckedPolicy(ExpectedUsePolicy(lambda: now[0]), naive)
    for what, blocks, standing, away, session in history:
        there = [block for block in blocks if block in naive]
        if what == "add":
            policy.add_all([block for block in blocks if block not in naive])
        elif what == "remove":
            policy.remove_all(there)
        elif what == "mark":
            policy.mark_all(blocks, standing, now[0] + away, session)
        elif what == "supersede":
            policy.supersede_all(there)
        elif what == "pop":
            policy.pop_all(len(blocks) // 2)
        elif what == "pop below":
            policy.pop_below(len(blocks), now[0] + away)
        elif what == "wait":
            now[0] += away
        elif what == "forget":
            policy.forget_all([block for block in blocks if block not in naive])
        assert len(policy) == len(list(policy))
        assert [block in policy for block in range(BLOCKS + 1)] == [block in naive for block in range(BLOCKS + 1)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 9), st.integers(1, 400)), max_size=60))
def test_sessions_that_share_what_they_begin_with(turns):
    """Long sessions over one system prompt: they end turns, wait, come back and lose blocks."""
    now = [0.0]
    policy = CheckedPolicy(ExpectedUsePolicy(lambda: now[0]), NaiveOrder(lambda: now[0]))
    own = {session: [*range(40), *range(100 * session, 100 * session + 60)] for session in range(1, 5)}
    for number, what, away, count in turns:
        session = number + 1
        blocks = own[session][::-1]
        now[0] += away / 3
        if what == 0:
            policy.remove_all([block for block in blocks if block in policy])
            policy.add_all(blocks)
            policy.mark_all(blocks, IDLE, 0.0, session)
            policy.mark_all(blocks, WAITING, now[0] + away, session)
        elif what == 1:
            policy.mark_all(blocks[: count % 100], WAITING, now[0] + away, session)
        else:
            gone = policy.pop_below(count // 4, now[0] + away)
            assert len(gone) <= count // 4
        list(policy)


def test_entries_that_stand_for_nothing_any_more_are_dropped():
    now = [0.0]
    policy = ExpectedUsePolicy(lambda: now[0])
    blocks = list(range(500))
    policy.add_all(blocks)
    for turn in range(1000):
        policy.mark_all(blocks, WAITING, turn + 1e6, session=1)
        policy.mark_all(blocks[: turn % 7], PINNED, turn + 1e6, session=1)
    runs = [*policy._in_order(), *(run for _, _, run in policy._ends)]
    assert sum(len(run.blocks) for run in runs) < 10 * len(blocks)
    assert len(runs) < 100
    assert sorted(policy) == blocks


def test_single_blocks_that_stand_together_become_one_run():
    policy = ExpectedUsePolicy()
    for block in range(5000):
        policy.add_all([block])
    assert len(list(policy._in_order())) < 2500
    assert list(policy) == list(range(5000))


def test_a_session_whose_time_is_over_still_loses_its_tail_first():
    now = [0.0]
    policy = ExpectedUsePolicy(lambda: now[0])
    policy.add_all([9])
    policy.add_all([3, 2, 1])
    policy.mark_all([3, 2, 1], WAITING, 5.0, session=1)
    assert list(policy) == [9, 3, 2, 1]
    now[0] = 11.0
    assert list(policy) == [3, 2, 1, 9]


def test_runs_whose_time_is_over_at_once_stay_in_the_order_in_which_they_were_named():
    now = [0.0]
    policy = CheckedPolicy(ExpectedUsePolicy(lambda: now[0]), NaiveOrder(lambda: now[0]))
    policy.add_all(list(range(400)))
    for start in range(0, 400, 2):  # so many runs that they are merged meanwhile
        policy.mark_all([start + 1, start], WAITING if start % 4 else PINNED, 5.0 if start % 4 else 10.0, start % 3)
    policy.mark_all([7, 3], WAITING, 5.0, 1)
    now[0] = 10.5
    assert list(policy)[-2:] == [7, 3]


def test_what_was_foreseen_is_over_with_the_next_use():
    policy = CheckedPolicy(ExpectedUsePolicy(lambda: 0.0), NaiveOrder(lambda: 0.0))
    policy.add_all([1])
    policy.mark_all([2, 3], WAITING, 9.0, 0)
    policy.add_all([3, 2])
    policy.add_all([4])
    assert list(policy) == [1, 4, 3, 2]
    assert policy.pop_below(4, 9.0) == [1, 4]
    policy.remove_all([3])
    policy.add_all([3, 5])
    assert list(policy) == [3, 5, 2]
    assert policy.pop_below(4, 8.0) == [3, 5, 2]


def test_a_block_that_is_not_there_cannot_be_taken_out():
    policy = ExpectedUsePolicy()
    policy.add_all([1, 2])
    with pytest.raises(KeyError):
        policy.remove_all([1, 3])
    with pytest.raises(KeyError):
        policy.supersede_all([5000])
    assert list(policy) == [1, 2]


@pytest.mark.parametrize("make", [LRUPolicy, ExpectedUsePolicy])
def test_without_marks_it_is_least_recently_used(make):
    policy = make()
    policy.add_all([3, 1])
    policy.add_all([2])
    policy.remove_all([3])
    policy.add_all([3, 4])
    policy.supersede_all([2, 4])
    with pytest.raises(KeyError):
        policy.remove_all([7])
    assert 4 in policy
    assert list(policy) == [4, 2, 1, 3]
    assert policy.pop_all(1) == [4]
    assert policy.pop_all(9) == [2, 1, 3]
    assert policy.pop_all(1) == []


def test_a_pool_keeps_the_session_that_is_back_first_and_what_all_begin_with():
    now = [0.0]
    pool = BlockPool(8, 1, ExpectedUsePolicy(lambda: now[0]))
    digests = {}
    shared = chain_digest(b"\0" * 16, b"shared")
    for session, name in ((1, "soon"), (2, "late"), (3, "idle")):
        known = pool.lookup([shared])
        pool.touch(known)
        own = pool.allocate(3 - len(known))
        chain = [shared, chain_digest(shared, name.encode()), chain_digest(shared, name.encode() * 2)]
        parent = shared if known else b"\0" * 16
        pool.publish(own, chain[len(known) :], parent)
        pool.free(known + own)
        digests[name] = chain
        pool.mark(chain, IDLE, session=session)
    pool.mark(digests["soon"], WAITING, expected=5.0, session=1)
    pool.mark(digests["late"], WAITING, expected=500.0, session=2)
    order = [pool.digest(block) for block in pool._policy]
    expected = [digests["idle"][2], digests["idle"][1], digests["late"][2], digests["late"][1]]
    assert order == [*expected, digests["soon"][2], digests["soon"][1], shared]
    taken = pool.allocate(4)
    assert len(pool.lookup(digests["soon"])) == 3
    assert len(pool.lookup(digests["late"])) == 2
    pool.free(taken)
    pool.check_integrity()


def test_what_is_forgotten_has_no_mark_left():
    pool = BlockPool(2, 1, ExpectedUsePolicy())
    (block,) = pool.publish(pool.allocate(1), [b"a" * 16], b"\0" * 16)
    pool.mark([b"a" * 16], PINNED, expected=float("inf"))
    pool.clear()
    pool.free([block])
    blocks = pool.allocate(2)
    pool.publish(blocks, [b"b" * 16, b"c" * 16], b"\0" * 16)
    pool.free(blocks)
    assert [pool.digest(block) for block in pool._policy] == [b"c" * 16, b"b" * 16]
