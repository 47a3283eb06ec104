"""Blocks that come back onto the device before their session does: the pool's books, whatever happens meanwhile."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.prefetching import FETCH_AT, Named, Prefetching
from offload.tickets import LoadTicket
from prefix_cache.block_pool import BlockPool
from prefix_cache.expected_use import ExpectedUsePolicy
from prefix_cache.hashing import chain_digest
from prefix_cache.worth import IDLE, WAITING

ROOT = b"\0" * 16
SESSIONS = 4
LENGTH = 3
BLOCKS = 8


def names_of(session: int, length: int = LENGTH) -> list[bytes]:
    """The first block is that of all sessions."""
    digests, parent = [], ROOT
    for at in range(length):
        parent = chain_digest(parent, b"%d" % (session if at else 0))
        digests.append(parent)
    return digests


class Tier:
    """Has what it was given. Loads come when the test says so."""

    is_fast = True

    def __init__(self) -> None:
        self.has: set[bytes] = set()
        self.tickets: list[LoadTicket] = []

    def reach(self, digests):
        count = 0
        for digest in digests:
            if digest not in self.has:
                break
            count += 1
        return count

    def fetch(self, digests, blocks):
        self.tickets.append(LoadTicket(digests, blocks, 0.0))
        return self.tickets[-1]


class Machine(RuleBasedStateMachine):
    """Sessions whose turns come and go, fetches that get as far as they get, and requests that take what they need."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.pool = BlockPool(BLOCKS, 1, ExpectedUsePolicy(lambda: self.now))
        self.tier = Tier()
        self.known: dict[int, Named] = {}
        self.prefetching = Prefetching(self.pool, self.tier, self.known.get, lambda: self.now)
        self.running: dict[int, list[int]] = {}  # session -> its table
        self.others: list[int] = []

    def room(self, blocks: int) -> bool:
        if self.pool.num_available < blocks:
            self.prefetching.give_way(blocks - self.pool.num_available)
        return self.pool.num_available >= blocks

    @rule(session=st.integers(1, SESSIONS))
    def turn_comes(self, session):
        if session in self.running:
            return
        digests = names_of(session)
        self.prefetching.arrives(session)
        found = self.pool.lookup(digests)
        if not self.room(len(digests) - len(found) + self.pool.unreferenced(found)):
            return
        found = self.pool.lookup(digests)
        self.pool.touch(found)
        own = self.pool.allocate(len(digests) - len(found))
        parent = digests[len(found) - 1] if found else ROOT
        self.running[session] = found + self.pool.publish(own, digests[len(found) :], parent)

    @rule(session=st.integers(1, SESSIONS), p50=st.floats(0, 5), tail=st.floats(1, 3), hinted=st.booleans(), kept=st.booleans())
    def turn_ends(self, session, p50, tail, hinted, kept):
        table = self.running.pop(session, None)
        if table is None:
            return
        digests = names_of(session)
        self.known[session] = Named(ROOT, digests)
        self.pool.free(table)
        if kept:
            self.tier.has.update(digests)
        self.pool.mark(digests, WAITING if hinted else IDLE, expected=self.now + p50 * tail, session=session)
        if hinted:
            self.prefetching.waits(session, p50, p50 * tail)

    @rule(session=st.integers(1, SESSIONS))
    def somebody_asks(self, session):
        if session not in self.running:
            self.prefetching.asked(session)

    @rule(session=st.integers(1, SESSIONS))
    def session_closes(self, session):
        self.known.pop(session, None)
        self.prefetching.forget(session)

    @rule(blocks=st.integers(1, 5))
    def somebody_needs_room(self, blocks):
        if self.room(blocks):
            self.others += self.pool.allocate(blocks)
        else:
            assert not list(self.prefetching.held), "a fetch kept what a request needs"

    @rule()
    def they_leave(self):
        self.pool.free(self.others)
        self.others = []

    @rule(data=st.data(), all_of_it=st.booleans())
    def blocks_come(self, data, all_of_it):
        waiting = [ticket for ticket in self.tier.tickets if not ticket.done]
        if waiting:
            ticket = data.draw(st.sampled_from(waiting))
            if not ticket.cancelled:
                ticket.loaded = len(ticket.blocks) if all_of_it else min(ticket.loaded + 1, len(ticket.blocks))
            ticket.done = all_of_it or ticket.loaded == len(ticket.blocks) or ticket.cancelled

    @rule(lost=st.integers(1, SESSIONS))
    def the_tier_loses_some(self, lost):
        self.tier.has -= set(names_of(lost)[1:])

    @rule(seconds=st.floats(0.01, 20))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def a_step(self):
        before = {block: self.pool.digest(block) for table in self.running.values() for block in table}
        self.prefetching.work()
        assert not self.prefetching.is_due() or self.prefetching.due_in() == 0.0
        assert all(self.pool.digest(block) == digest for block, digest in before.items()), "a running turn lost a block"

    @rule()
    def clear(self):
        self.pool.clear()

    @invariant()
    def books_balance(self):
        held: dict[int, int] = {}
        for block in (*self.others, *self.prefetching.held, *(block for table in self.running.values() for block in table)):
            held[block] = held.get(block, 0) + 1
        self.pool.check_integrity(held)
        written = {block for ticket in self.tier.tickets if not ticket.cancelled for block in ticket.blocks}
        assert written == set(self.prefetching.held), "a fetch may write to what is not its own"

    @invariant()
    def counts_balance(self):
        counts = self.prefetching.counts
        kept = sum(len(digests) for _, digests in self.prefetching._brought.values())
        assert counts.fetched == counts.useful + counts.useless + kept

    def teardown(self):
        self.prefetching.close()
        assert not list(self.prefetching.held)
        for table in self.running.values():
            self.pool.free(table)
        self.pool.free(self.others)
        assert self.pool.num_available == BLOCKS


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestPrefetching = Machine.TestCase


class Desk:
    """A pool in which session 1 has lost all it had, and a tier that has it."""

    def __init__(self, blocks: int = 6, length: int = 4) -> None:
        self.now = 0.0
        self.pool = BlockPool(blocks, 1, ExpectedUsePolicy(lambda: self.now))
        self.tier = Tier()
        self.names = {session: Named(ROOT, names_of(session, length)[1:]) for session in (1, 2, 3)}
        self.prefetching = Prefetching(self.pool, self.tier, self.names.get, lambda: self.now)
        self.tier.has.update(self.names[1].digests)

    def fill(self, session: int, standing: int, expected: float) -> None:
        digests = self.names[session].digests
        self.pool.free(self.pool.publish(self.pool.allocate(len(digests)), digests, ROOT))
        self.pool.mark(digests, standing, expected=expected, session=session)

    def come(self) -> None:
        for ticket in self.tier.tickets:
            ticket.loaded, ticket.done = len(ticket.blocks), True
        self.prefetching.work()


def test_a_session_is_fetched_at_half_its_median_time_away_and_found_when_it_is_back():
    desk = Desk()
    desk.prefetching.waits(1, 4.0, 10.0)
    assert desk.prefetching.due_in() == FETCH_AT * 4.0 == 2.0
    desk.now = 1.9
    assert not desk.prefetching.is_due()
    desk.now = 2.0
    assert desk.prefetching.is_due()
    desk.prefetching.work()
    assert desk.pool.num_referenced == 3
    desk.come()
    assert desk.pool.num_referenced == 0
    desk.prefetching.arrives(1)
    assert len(desk.pool.lookup(desk.names[1].digests)) == 3
    counts = desk.prefetching.counts
    assert (counts.fetched, counts.useful, counts.useless, counts.called_off) == (3, 3, 0, 0)


def test_who_is_back_sooner_is_not_pushed_out_and_who_is_back_much_later_is():
    for expected, stays in ((5.0, True), (10.5, True), (60.0, False)):
        desk = Desk(blocks=3)
        desk.fill(2, WAITING, expected)
        desk.prefetching.waits(1, 4.0, 10.0)
        desk.now = 2.0
        desk.prefetching.work()
        desk.come()
        assert len(desk.pool.lookup(desk.names[2].digests)) == (3 if stays else 0)
        assert len(desk.pool.lookup(desk.names[1].digests)) == (0 if stays else 3)


def test_a_slow_tier_fills_what_is_free_and_displaces_nobody_who_is_expected():
    desk = Desk(blocks=4)
    desk.tier.is_fast = False
    desk.fill(2, WAITING, 600.0)
    desk.prefetching.waits(1, 0.0, 10.0)
    desk.prefetching.work()
    desk.come()
    assert len(desk.pool.lookup(desk.names[2].digests)) == 3
    assert len(desk.pool.lookup(desk.names[1].digests)) == 1


def test_what_there_is_no_room_for_is_tried_again_a_few_times_and_then_no_more():
    desk = Desk(blocks=3)
    taken = desk.pool.allocate(3)
    desk.prefetching.waits(1, 4.0, 10.0)
    tries = 0
    while (wait := desk.prefetching.due_in()) is not None:
        desk.now += wait
        desk.prefetching.work()
        tries += 1
        assert tries < 20
    assert 3 <= tries <= 7
    assert desk.now <= 10.0
    desk.pool.free(taken)
    desk.prefetching.waits(1, 4.0, 10.0)
    desk.now += 2.0
    taken = desk.pool.allocate(2)
    desk.prefetching.work()
    desk.come()
    assert len(desk.pool.lookup(desk.names[1].digests)) == 1, "the head of it fits"
    desk.pool.free(taken)
    desk.now += 2.0
    desk.prefetching.work()
    desk.come()
    assert len(desk.pool.lookup(desk.names[1].digests)) == 3


def test_a_request_takes_the_room_of_a_fetch_at_once_and_keeps_what_has_come_in_the_pool():
    desk = Desk(blocks=3)
    desk.prefetching.waits(1, 0.0, 10.0)
    desk.prefetching.work()
    (ticket,) = desk.tier.tickets
    ticket.loaded = 1
    assert desk.pool.num_available == 0
    assert desk.prefetching.give_way(2)
    assert ticket.cancelled
    assert desk.pool.num_available == 3
    assert len(desk.pool.lookup(desk.names[1].digests)) == 1
    assert not desk.prefetching.give_way(1)
    counts = desk.prefetching.counts
    assert (counts.fetched, counts.called_off) == (1, 2)


def test_a_turn_that_is_faster_than_its_fetch_goes_on_from_what_has_come():
    desk = Desk()
    desk.prefetching.asked(1)
    desk.prefetching.work()
    desk.tier.tickets[0].loaded = 2
    desk.prefetching.arrives(1)
    assert len(desk.pool.lookup(desk.names[1].digests)) == 2
    assert desk.prefetching.counts.useful == 2
    assert desk.prefetching.due_in() is None


def test_a_fetch_whose_medium_hangs_is_called_off_and_one_for_nobody_counts_as_useless():
    desk = Desk()
    desk.prefetching.asked(1)
    desk.prefetching.work()
    desk.tier.tickets[0].loaded = 1
    desk.now = 6.0
    assert desk.prefetching.is_due()
    desk.prefetching.work()
    assert desk.tier.tickets[0].cancelled
    desk.prefetching.forget(1)
    assert desk.prefetching.counts.useless == 1
    assert desk.pool.num_referenced == 0
