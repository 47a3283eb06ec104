"""The pool against a naive model of it, under random histories of sequences that share, grow, fork and end."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from prefix_cache.block_pool import BlockPool, PoolExhausted
from prefix_cache.events import AllCleared, BlocksRemoved, BlocksStored
from prefix_cache.expected_use import ExpectedUsePolicy
from prefix_cache.hashing import chain_digest, pack_tokens, split_digests
from prefix_cache.worth import WAITING
from tests.prefix_cache.naive_order import CheckedPolicy, NaiveOrder

ROOT = b"\x00" * 16
NUM_BLOCKS = 7


class Sequence:
    def __init__(self):
        self.table = []
        self.digests = []  # of the published part


class PoolMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 2)
        self.live = []
        self.content = {}  # block -> digest of what its owner last put there; guards against overwritten shared blocks
        self.visible = set()  # what a subscriber to the events believes

    def held(self):
        return Counter(block for sequence in self.live for block in sequence.table)

    @rule(target=sequences)
    def start(self):
        sequence = Sequence()
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, token=st.integers(0, 2))
    def grow_and_publish(self, sequence, token):
        if len(sequence.table) != len(sequence.digests):
            return
        available = self.pool.num_available
        try:
            (block,) = self.pool.allocate(1)
        except PoolExhausted:
            assert available == 0
            return
        assert self.held()[block] == 0, "a block in use was handed out"
        parent = sequence.digests[-1] if sequence.digests else ROOT
        digest = chain_digest(parent, pack_tokens([token, token]))
        self.content[block] = digest
        (kept,) = self.pool.publish([block], [digest], parent)
        assert self.content[kept] == digest, "another block's content was handed over"
        sequence.table.append(kept)
        sequence.digests.append(digest)

    @rule(sequence=sequences, tokens=st.lists(st.integers(0, 2), max_size=4))
    def reuse(self, sequence, tokens):
        if sequence.table:
            return
        digests, parent = [], ROOT
        for token in tokens:
            parent = chain_digest(parent, pack_tokens([token, token]))
            digests.append(parent)
        found = self.pool.lookup(digests)
        assert [self.content[block] for block in found] == digests[: len(found)]
        before = self.pool.num_available
        cached = self.pool.unreferenced(found)
        self.pool.touch(found)
        assert self.pool.num_available == before - cached
        sequence.table = list(found)
        sequence.digests = digests[: len(found)]

    @rule(sequence=sequences)
    def grow_partial(self, sequence):
        if len(sequence.table) != len(sequence.digests) or self.pool.num_available == 0:
            return
        (block,) = self.pool.allocate(1)
        assert self.held()[block] == 0
        self.content[block] = None
        sequence.table.append(block)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        child = Sequence()
        child.table = list(sequence.table)
        child.digests = list(sequence.digests)
        self.pool.touch(child.table)
        self.live.append(child)
        return child

    @rule(sequence=sequences)
    def write_partial(self, sequence):
        if len(sequence.table) == len(sequence.digests):
            return
        block = sequence.table[-1]
        if not self.pool.is_shared(block):
            assert self.held()[block] == 1
            return
        if self.pool.num_available == 0:
            return
        private = self.pool.copy_on_write(block)
        assert self.held()[private] == 0
        self.content[private] = None
        sequence.table[-1] = private

    @rule(sequence=consumes(sequences))
    def end(self, sequence):
        self.pool.free(sequence.table)
        self.live.remove(sequence)

    @rule(tokens=st.lists(st.integers(0, 2), max_size=4))
    def supersede(self, tokens):
        digests, parent = [], ROOT
        for token in tokens:
            parent = chain_digest(parent, pack_tokens([token, token]))
            digests.append(parent)
        assert self.pool.supersede(digests) == sum(digest in self.visible for digest in digests)

    @precondition(lambda self: self.pool.num_cached > 0)
    @rule()
    def clear(self):
        self.pool.clear()
        for sequence in self.live:
            sequence.digests = sequence.digests[: len(sequence.table)]

    @invariant()
    def books_balance(self):
        self.pool.check_integrity(self.held())
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_referenced == NUM_BLOCKS

    @invariant()
    def events_tell_the_truth(self):
        for event in self.pool.take_events():
            match event:
                case BlocksStored(digests=joined, parent=_):
                    stored = split_digests(joined)
                    assert not self.visible & set(stored)
                    self.visible |= set(stored)
                case BlocksRemoved(digests=joined):
                    removed = set(split_digests(joined))
                    assert removed <= self.visible
                    self.visible -= removed
                case AllCleared():
                    self.visible.clear()
        assert self.visible == set(split_digests(self.pool.snapshot()))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


class MarkedPoolMachine(PoolMachine):
    """The same with the policy that orders by expected use, and marks at random."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.naive = NaiveOrder(lambda: self.now)
        policy = CheckedPolicy(ExpectedUsePolicy(lambda: self.now), self.naive)
        self.pool = BlockPool(NUM_BLOCKS, 2, policy)

    @rule(standing=st.integers(0, 4), away=st.integers(0, 9), session=st.integers(0, 2), data=st.data())
    def mark(self, standing, away, session, data):
        known = sorted(self.visible)
        digests = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        assert self.pool.mark(digests, standing, expected=self.now + away, session=session) == len(digests)

    @rule(target=PoolMachine.sequences, count=st.integers(0, 4), away=st.integers(0, 9))
    def take_spare(self, count, away):
        """What is taken for a prefetch: nothing that anybody holds, and nothing that is worth more."""
        free = self.pool.num_free
        order = list(self.pool._policy)  # whoever's time is over counts as idle from here on
        worth = dict(self.naive.order)
        blocks = self.pool.allocate_spare(count, self.now + away)
        assert len(blocks) <= count
        assert blocks[free:] == order[: max(0, len(blocks) - free)]
        assert len(blocks) >= min(count, free)
        for block in blocks:
            assert self.held()[block] == 0
            if block in worth:
                standing, later, _ = worth[block]
                assert standing < WAITING or (standing == WAITING and -later > self.now + away)
            self.content[block] = None
        sequence = Sequence()
        # Each its own holder, as a table may have only one block that is not published.
        for block in blocks[1:]:
            self.pool.free([block])
        sequence.table = blocks[:1]
        self.live.append(sequence)
        return sequence

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds):
        self.now += seconds


MarkedPoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestMarkedPool = MarkedPoolMachine.TestCase
