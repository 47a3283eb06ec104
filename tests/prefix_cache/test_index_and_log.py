"""A worker's log and the index at the other end of a line that loses, repeats and reorders: in the end they agree."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_cache.event_log import EventLog
from prefix_cache.events import DEVICE, DISK, HOST, AllCleared, BlocksRemoved, BlocksStored, EventBatch
from prefix_cache.hashing import join_digests
from prefix_cache.index import Outcome, ResidencyIndex

ROOT = b"r" * 16
CHAIN = [bytes([n]) * 16 for n in range(1, 21)]


class Worker:
    """Blocks by tier, and a log that keeps few batches, so that snapshots are needed now and then."""

    def __init__(self, life):
        self.log = EventLog(life, capacity=6)
        self.tiers = {DEVICE: set(), HOST: set(), DISK: set()}

    def change(self, rng):
        tier = rng.choice(list(self.tiers))
        digests = rng.sample(CHAIN, rng.randrange(1, 8))
        event = rng.choice([BlocksStored, BlocksStored, BlocksRemoved])
        if rng.random() < 0.05:
            for held in self.tiers.values():
                held.clear()
            return self.log.append([AllCleared()])
        if event is BlocksStored:
            # Parents may be blocks that nobody ever heard of.
            self.tiers[tier].update(digests)
            return self.log.append([BlocksStored(join_digests(digests), rng.randbytes(16), tier)])
        self.tiers[tier].difference_update(digests)
        return self.log.append([BlocksRemoved(join_digests(digests), tier)])

    def snapshot(self):
        return self.log.snapshot({tier: join_digests(sorted(held)) for tier, held in self.tiers.items()})


def resubscribe(index, worker):
    """What the subscriber does after a gap: asks from where it was, and takes a replay or a snapshot."""
    known = index.position("w")
    place = worker.log.subscribe(known.instance if known else None, known.seq if known else 0, lambda: None)
    messages = [worker.snapshot()] if place.needs_snapshot else place.read(100)
    place.close()
    for message in messages:
        assert index.apply("w", message) is not Outcome.GAP


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([0.0, 0.1, 0.4]))
def test_whatever_the_line_does_the_index_agrees_after_a_heartbeat(seed, steps, trouble):
    rng = random.Random(seed)
    index, worker, life = ResidencyIndex(), Worker("life-0"), 0
    on_the_way: list[EventBatch] = []
    for _ in range(steps):
        if rng.random() < 0.03:
            life += 1
            worker = Worker(f"life-{life}")
        on_the_way.append(worker.change(rng))
        if rng.random() < trouble:
            kind = rng.choice(["lose", "repeat", "shuffle", "old"])
            if kind == "lose":
                on_the_way.pop(rng.randrange(len(on_the_way)))
            elif kind == "repeat":
                on_the_way.append(rng.choice(on_the_way))
            elif kind == "shuffle":
                rng.shuffle(on_the_way)
            else:
                on_the_way.insert(0, on_the_way[-1])
        while on_the_way and rng.random() < 0.7:
            if index.apply("w", on_the_way.pop(0)) is Outcome.GAP:
                resubscribe(index, worker)
    # Whatever is still on the way is lost with the connection; a heartbeat tells.
    if index.apply("w", worker.log.heartbeat()) is Outcome.GAP:
        resubscribe(index, worker)
    assert (index.position("w").instance, index.position("w").seq) == (worker.log.instance, worker.log.seq)
    for digest in CHAIN:
        assert index.tiers("w", digest) == tuple(tier for tier in (DEVICE, HOST, DISK) if digest in worker.tiers[tier])
    assert index.blocks("w") == len(set().union(*worker.tiers.values()))


def test_blocks_behind_an_unknown_parent_count_once_it_is_known():
    index = ResidencyIndex()
    index.apply("w", EventBatch("i", 1, (BlocksStored(join_digests(CHAIN[5:10]), CHAIN[4]),)))
    assert index.lookup(CHAIN) == {}
    assert index.blocks("w") == 5
    index.apply("w", EventBatch("i", 2, (BlocksStored(join_digests(CHAIN[:5]), ROOT),)))
    assert index.lookup(CHAIN) == {"w": 10}


def test_digests_of_a_length_that_cannot_be_are_no_blocks():
    index = ResidencyIndex()
    broken = join_digests(CHAIN[:2]) + b"short"
    assert index.apply("w", EventBatch("i", 1, (BlocksStored(broken, ROOT), BlocksStored(b"", ROOT)))) is Outcome.APPLIED
    assert index.lookup(CHAIN) == {"w": 2}
    index.apply("w", EventBatch("i", 2, (BlocksRemoved(CHAIN[1] + b"x"), BlocksRemoved(b"y"))))
    assert index.lookup(CHAIN) == {"w": 1}
