from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefix_cache.event_log import EventLog
from prefix_cache.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch, Snapshot
from prefix_cache.hashing import join_digests, split_digests

ROOT = bytes(16)


def digest(number):
    return number.to_bytes(16, "big")


def stored(*numbers, tier="device"):
    return BlocksStored(join_digests(map(digest, numbers)), ROOT, tier)


def removed(*numbers, tier="device"):
    return BlocksRemoved(join_digests(map(digest, numbers)), tier)


def ignore():
    pass


def test_batches_are_numbered_from_one_and_empty_ones_are_not_batches():
    log = EventLog("life", 8)
    assert log.append([]) is None
    assert log.seq == 0
    first = log.append([stored(1)])
    second = log.append([stored(2), removed(1)])
    assert (first.seq, second.seq, log.seq) == (1, 2, 2)
    assert second.events == (stored(2), removed(1))
    assert log.replay(0) == [first, second]
    assert log.replay(1) == [second]
    assert log.replay(2) == []
    assert log.heartbeat().seq == 2


def test_replay_says_none_for_what_is_gone_or_was_never_there():
    log = EventLog("life", 3)
    for number in range(10):
        log.append([stored(number)])
    assert log.oldest == 8
    assert [batch.seq for batch in log.replay(7)] == [8, 9, 10]
    assert log.replay(6) is None
    assert log.replay(11) is None
    assert log.replay(-1) is None


def test_the_tail_is_bounded_by_bytes_too():
    log = EventLog("life", capacity=1000, max_bytes=10_000)
    for start in range(0, 10_000, 100):
        log.append([stored(*range(start, start + 100))])
    assert log.tail_bytes <= 10_000
    assert log.replay(log.oldest - 1)[-1].seq == log.seq
    # One batch larger than the bound is not kept, and leaves a log that still counts.
    log.append([stored(*range(2000))])
    assert log.tail_bytes == 0
    assert log.replay(log.seq) == []
    assert log.replay(log.seq - 1) is None


def test_nonsense_bounds_are_refused():
    with pytest.raises(ValueError, match="capacity"):
        EventLog("life", 0)
    with pytest.raises(ValueError, match="max_bytes"):
        EventLog("life", 1, 0)


@pytest.mark.parametrize(
    ("instance", "after", "snapshot"),
    [("life", 2, False), ("life", 0, False), ("life", 3, True), ("other", 2, True), (None, None, True), ("life", None, True)],
)
def test_who_starts_with_a_snapshot(instance, after, snapshot):
    log = EventLog("life", 8)
    log.append([stored(1)])
    log.append([stored(2)])
    assert log.subscribe(instance, after, ignore).needs_snapshot is snapshot


def test_a_waiting_subscriber_is_woken_once_and_a_reading_one_never():
    log = EventLog("life", 8)
    woken = []
    subscription = log.subscribe("life", 0, lambda: woken.append(log.seq))
    log.append([stored(1)])
    assert woken == []  # it has not asked yet
    assert [batch.seq for batch in subscription.read(10)] == [1]
    assert subscription.read(10) == []
    log.append([stored(2)])
    log.append([stored(3)])
    assert woken == [2]
    assert [batch.seq for batch in subscription.read(1)] == [2]
    assert [batch.seq for batch in subscription.read(1)] == [3]
    subscription.close()
    subscription.close()
    assert log.subscribers == 0
    log.append([stored(4)])
    assert woken == [2]


def test_one_who_lags_behind_the_tail_is_given_a_snapshot():
    log = EventLog("life", 2)
    subscription = log.subscribe("life", 0, ignore)
    for number in range(5):
        log.append([stored(number)])
    assert subscription.needs_snapshot
    assert subscription.read(10) == []
    subscription.give(log.snapshot({"device": b""}))
    assert not subscription.needs_snapshot
    log.append([stored(9)])
    assert [batch.seq for batch in subscription.read(10)] == [6]
    with pytest.raises(ValueError, match="instance"):
        subscription.give(Snapshot("other", 3, {}))


class Worker:
    def __init__(self, life, capacity, max_bytes):
        self.log = EventLog(f"life-{life}", capacity, max_bytes)
        self.tiers = defaultdict(set)

    def snapshot(self):
        return self.log.snapshot({tier: join_digests(sorted(digests)) for tier, digests in self.tiers.items() if digests})


class Subscriber:
    """What the other side of the wire does: applies what it gets, remembers where it was."""

    def __init__(self):
        self.instance = None
        self.after = None
        self.tiers = defaultdict(set)
        self.subscription = None

    def apply(self, message):
        if isinstance(message, Snapshot):
            self.tiers = defaultdict(set, {tier: set(split_digests(joined)) for tier, joined in message.tiers.items()})
        else:
            assert isinstance(message, EventBatch)
            assert message.instance == self.instance
            assert message.seq == self.after + 1
            for event in message.events:
                if isinstance(event, AllCleared):
                    self.tiers.clear()
                elif isinstance(event, BlocksStored):
                    self.tiers[event.tier] |= set(split_digests(event.digests))
                else:
                    gone = set(split_digests(event.digests))
                    assert gone <= self.tiers[event.tier]
                    self.tiers[event.tier] -= gone
        self.instance, self.after = message.instance, message.seq


class SubscribersFollow(RuleBasedStateMachine):
    """However often they hang up, lag or lose the worker, subscribers that catch up hold exactly what the worker holds."""

    @initialize(capacity=st.integers(1, 6), max_bytes=st.integers(1, 2000), subscribers=st.integers(1, 4))
    def start(self, capacity, max_bytes, subscribers):
        self.bounds = (capacity, max_bytes)
        self.lives = 1
        self.worker = Worker(1, capacity, max_bytes)
        self.subscribers = [Subscriber() for _ in range(subscribers)]

    @rule(data=st.data(), steps=st.integers(1, 8))
    def work(self, data, steps):
        for _ in range(steps):
            events = []
            for tier in data.draw(st.lists(st.sampled_from(["device", "host"]), max_size=3)):
                held = self.worker.tiers[tier]
                new = data.draw(st.sets(st.integers(0, 40).map(digest), max_size=5)) - held
                old = set(data.draw(st.lists(st.sampled_from(sorted(held)), max_size=4))) if held else set()
                if old:
                    events.append(BlocksRemoved(join_digests(sorted(old)), tier))
                if new:
                    events.append(BlocksStored(join_digests(sorted(new)), ROOT, tier))
                self.worker.tiers[tier] = (held - old) | new
            self.worker.log.append(events)

    @rule()
    def clear(self):
        self.worker.tiers.clear()
        self.worker.log.append([AllCleared()])

    @rule()
    def restart(self):
        self.lives += 1
        self.worker = Worker(self.lives, *self.bounds)
        for subscriber in self.subscribers:
            subscriber.subscription = None

    @rule(data=st.data())
    def hang_up(self, data):
        subscriber = data.draw(st.sampled_from(self.subscribers))
        if subscriber.subscription is not None:
            subscriber.subscription.close()
            subscriber.subscription = None

    @rule(data=st.data(), reads=st.integers(1, 4), limit=st.integers(1, 3), lost=st.booleans())
    def read(self, data, reads, limit, lost):
        subscriber = data.draw(st.sampled_from(self.subscribers))
        for _ in range(reads):
            self.read_once(subscriber, limit, lost)

    def read_once(self, subscriber, limit, lost=False):
        """One exchange; `lost`: the connection breaks after the first message of it."""
        if subscriber.subscription is None:
            subscriber.subscription = self.worker.log.subscribe(subscriber.instance, subscriber.after, ignore)
        if subscriber.subscription.needs_snapshot:
            messages = [self.worker.snapshot()]
            subscriber.subscription.give(messages[0])
        else:
            messages = subscriber.subscription.read(limit)
        for message in messages[:1] if lost else messages:
            subscriber.apply(message)
        if lost:
            subscriber.subscription.close()
            subscriber.subscription = None
        return messages

    @rule()
    def everybody_catches_up(self):
        for subscriber in self.subscribers:
            while self.read_once(subscriber, 2):
                pass
            assert subscriber.after == self.worker.log.seq
            held = {tier: digests for tier, digests in self.worker.tiers.items() if digests}
            assert {tier: digests for tier, digests in subscriber.tiers.items() if digests} == held

    @invariant()
    def memory_is_bounded(self):
        if hasattr(self, "worker"):
            capacity, max_bytes = self.bounds
            log = self.worker.log
            assert log.seq + 1 - log.oldest <= capacity
            assert log.tail_bytes <= max_bytes
            assert log.subscribers <= len(self.subscribers)

    def teardown(self):
        if hasattr(self, "worker"):
            self.everybody_catches_up()


SubscribersFollow.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_subscribers_follow = SubscribersFollow.TestCase
