import asyncio
import logging
import time

import pytest
from fake_replica import until

from gateway.workers.base import WorkerUnavailableError
from gateway.workers.kv_subscriber import KVEventSubscriber
from prefix_cache.events import BlocksStored, EventBatch, Heartbeat, Snapshot
from prefix_cache.hashing import join_digests
from prefix_cache.index import Position, ResidencyIndex

DIGESTS = [bytes([n]) * 16 for n in range(1, 20)]


def batch(seq, *numbers, instance="i"):
    return EventBatch(instance, seq, (BlocksStored(join_digests(DIGESTS[n] for n in numbers), b"r" * 16),))


def snapshot(seq, *numbers, instance="i"):
    return Snapshot(instance, seq, {"device": join_digests(DIGESTS[n] for n in numbers)})


class Script:
    """A worker whose every subscription plays the next list of messages; "hang" waits, an exception is raised."""

    def __init__(self, *plays):
        self.plays = list(plays)
        self.asked = []
        self.open = 0

    async def kv_events(self, instance, after):
        self.asked.append((instance, after))
        self.open += 1
        try:
            for step in self.plays.pop(0) if self.plays else ["hang"]:
                if step == "hang":
                    await asyncio.Event().wait()
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.open -= 1


@pytest.fixture
async def follow():
    subscribers = []

    def start(script, **settings):
        index = ResidencyIndex()
        settings = {"backoff_first": 0.01, "backoff_max": 0.05} | settings
        subscriber = KVEventSubscriber("w", script, index, clock=time.monotonic, **settings)
        subscribers.append(subscriber)
        subscriber.start()
        subscriber.start()
        return subscriber, index

    yield start
    for subscriber in subscribers:
        subscriber.stop()
        await subscriber.wait_stopped()


async def test_a_gap_is_asked_for_again_from_where_it_was(follow):
    script = Script([snapshot(3, 0), batch(4, 1), batch(6, 2)], [batch(5, 3), batch(6, 2), batch(7, 4), "hang"])
    subscriber, index = follow(script)
    await until(lambda: index.position("w") == Position("i", 7))
    assert script.asked == [(None, 0), ("i", 4)]
    assert subscriber.gaps == 1
    assert index.blocks("w") == 5


async def test_a_heartbeat_betrays_what_was_missed(follow):
    script = Script([snapshot(3, 0), Heartbeat("i", 3), Heartbeat("i", 5)], [batch(4, 1), batch(5, 2), "hang"])
    subscriber, index = follow(script)
    await until(lambda: index.position("w") == Position("i", 5))
    assert script.asked[1] == ("i", 3)
    assert index.blocks("w") == 3
    assert subscriber.gaps == 1


async def test_another_life_forgets_the_old_one(follow):
    script = Script([snapshot(3, 0, 1), batch(9, 2, instance="j")], [snapshot(9, 2, instance="j"), "hang"])
    _, index = follow(script)
    await until(lambda: index.position("w") == Position("j", 9))
    # Nothing of life i was left to ask from.
    assert script.asked == [(None, 0), (None, 0)]
    assert index.lookup(DIGESTS[:1]) == {}
    assert index.lookup(DIGESTS[2:3]) == {"w": 1}


async def test_failures_are_retried_and_said_once(follow, caplog):
    error = WorkerUnavailableError("it is gone", reached=False)
    script = Script([error], [error], [], [snapshot(1, 0), "hang"])
    subscriber, index = follow(script)
    await until(lambda: index.position("w") == Position("i", 1))
    assert subscriber.reconnects == 3
    assert [message for message in caplog.messages if "interrupted" in message] == [
        "worker w: KV events interrupted (it is gone); subscribing again"
    ]


async def test_silence_counts_as_a_dead_stream(follow):
    script = Script([snapshot(1, 0), "hang"], [Heartbeat("i", 1), "hang"])
    subscriber, _ = follow(script, silence=0.1)
    await until(lambda: len(script.asked) >= 2)
    assert script.asked[1] == ("i", 1)
    assert not subscriber.stale
    await until(lambda: subscriber.lag > 0.04)


async def test_nothing_is_applied_after_stop_even_half_a_snapshot(follow):
    go = asyncio.Event()

    class Slow(Script):
        async def kv_events(self, instance, after):
            yield snapshot(1, *range(10))
            go.set()
            await asyncio.Event().wait()

    subscriber, index = follow(Slow())
    await go.wait()
    assert index.blocks("w") == 10
    subscriber.stop()
    index.remove_worker("w")
    await subscriber.wait_stopped()
    assert index.position("w") is None
    subscriber.start()
    assert index.blocks("w") == 0


async def test_a_large_snapshot_leaves_the_loop_room(follow):
    import os

    digests = os.urandom(16 * 100_000)
    subscriber, index = follow(Script([Snapshot("i", 1, {"device": digests}), "hang"]))
    turns = 0
    async with asyncio.timeout(10):
        while index.position("w") is None:
            turns += 1
            await asyncio.sleep(0)
    assert turns >= 20
    assert index.blocks("w") == 100_000
    assert not subscriber.stale


@pytest.mark.parametrize(
    ("end", "level", "words"),
    [
        ((), logging.INFO, "worker w has ended its KV events"),
        ((WorkerUnavailableError("it broke off", reached=True),), logging.WARNING, "KV events interrupted (it broke off)"),
        ((batch(9, 2),), logging.WARNING, "KV events interrupted (a gap in the sequence numbers)"),
    ],
)
async def test_who_ends_in_order_is_not_warned_of_and_who_vanishes_is(follow, caplog, end, level, words):
    caplog.set_level(logging.INFO)
    script = Script([snapshot(3, 1), *end], ["hang"])
    follow(script)
    await until(lambda: len(script.asked) == 2)
    (record,) = caplog.records
    assert (record.levelno, words in record.message) == (level, True)
