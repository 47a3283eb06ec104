"""The order in which a device gives blocks up, against a list that is sorted anew each time."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from prefix_cache.block_pool import BlockPool
from prefix_cache.expected_use import ExpectedUsePolicy
from prefix_cache.hashing import chain_digest
from prefix_cache.worth import IDLE, PINNED, SHARED, SUPERSEDED, WAITING

BLOCKS = 8


class Naive:
    """What each block is worth, in full."""

    def __init__(self, clock):
        self.clock = clock
        self.order = {}  # block -> sort key
        self.marks = {}
        self.sessions = {}
        self.shared = set()
        self.turn = 0

    def key(self, block):
        standing, expected, _until = self.marks.get(block, (IDLE, 0.0, 0.0))
        return (standing, -expected if standing == WAITING else 0.0, self.turn)

    def add(self, block):
        self.turn += 1
        self.order[block] = self.key(block)

    def remove(self, block):
        del self.order[block]
        self.marks.pop(block, None)

    def supersede(self, block):
        self.turn += 1
        self.marks.pop(block, None)
        self.order[block] = (SUPERSEDED, 0.0, -self.turn)

    def mark(self, block, standing, expected, session):
        if session:
            if self.sessions.setdefault(block, session) != session:
                self.shared.add(block)
            self.sessions[block] = session
        if block in self.shared and standing != PINNED:
            standing = SHARED
        grace = max(expected - self.clock(), 1.0) if standing == WAITING else 0.0
        self.marks[block] = (standing, expected, expected + grace)
        if block in self.order:
            self.add(block)

    def expire(self):
        over = [
            (self.marks[block][2], key[2], block)
            for block, key in self.order.items()
            if key[0] in (WAITING, PINNED) and self.marks[block][2] < self.clock()
        ]
        for _, _, block in sorted(over):
            self.turn += 1
            del self.marks[block]
            self.order[block] = (IDLE, 0.0, -self.turn)

    def sequence(self):
        self.expire()
        return sorted(self.order, key=self.order.get)

    def pop(self):
        block = self.sequence()[0]
        del self.order[block]
        self.forget(block)
        return block

    def pop_below(self, expected):
        order = self.sequence()
        if not order:
            return None
        standing, later, _ = self.order[order[0]]
        worth_less = standing < WAITING or (standing == WAITING and -later > expected)
        return self.pop() if worth_less else None

    def forget(self, block):
        self.marks.pop(block, None)
        self.sessions.pop(block, None)
        self.shared.discard(block)


actions = st.tuples(
    st.sampled_from(["toggle", "toggle", "mark", "mark", "mark", "supersede", "pop", "pop below", "wait"]),
    st.integers(0, BLOCKS - 1),
    st.sampled_from([SUPERSEDED, IDLE, WAITING, WAITING, PINNED]),
    st.integers(0, 40),
    st.integers(0, 2),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(actions, max_size=80))
def test_it_is_the_sorted_order(history):
    now = [100.0]
    policy, naive = ExpectedUsePolicy(lambda: now[0]), Naive(lambda: now[0])
    for what, block, standing, away, session in history:
        if what == "toggle":
            known = block in naive.order
            for order in (policy, naive):
                (order.remove if known else order.add)(block)
        elif what == "mark":
            for order in (policy, naive):
                order.mark(block, standing, now[0] + away, session)
        elif what == "supersede" and block in naive.order:
            policy.supersede(block)
            naive.supersede(block)
        elif what == "pop" and naive.order:
            assert policy.pop() == naive.pop()
        elif what == "pop below":
            expected = naive.pop_below(now[0] + away)
            assert policy.pop_below(now[0] + away) == expected
        elif what == "wait":
            now[0] += away
        assert list(policy) == naive.sequence()
        assert len(policy) == len(naive.order)
        assert [number in policy for number in range(BLOCKS)] == [number in naive.order for number in range(BLOCKS)]


def test_without_marks_it_is_least_recently_used():
    policy = ExpectedUsePolicy()
    for block in (3, 1, 2):
        policy.add(block)
    policy.remove(3)
    policy.add(3)
    assert [policy.pop(), policy.pop(), policy.pop()] == [1, 2, 3]
    with pytest.raises(KeyError):
        policy.pop()


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
