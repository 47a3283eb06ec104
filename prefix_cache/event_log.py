"""The numbered log of one worker's KV events, and the places of its subscribers in it.

A subscriber holds a place (a sequence number), never a queue: all of them read the one bounded tail. Whoever lags behind the
tail, comes late or comes from another life of the worker is given a snapshot instead, so neither a slow subscriber nor a
thousand of them cost more memory than the tail.

Pure and single-threaded: nothing here waits, reads a clock or knows of asyncio. The owner appends what a step changed, is
called back when a waiting subscriber has something to read, and hands in snapshots when one is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from prefix_cache.events import AllCleared, EventBatch, Heartbeat, KVEvent, Snapshot

DEFAULT_BATCHES = 10_000
DEFAULT_BYTES = 64 * 2**20
_EVENT_OVERHEAD = 128


class EventLog:
    """Numbers the batches of one worker life and keeps the newest of them.

    The tail is bounded by `capacity` batches and by `max_bytes` of digests, whichever is reached first. A batch that alone
    exceeds `max_bytes` is not kept: its subscribers get a snapshot, which is smaller.
    """

    def __init__(self, instance: str, capacity: int = DEFAULT_BATCHES, max_bytes: int = DEFAULT_BYTES) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is the number of batches kept for replay and must be at least 1, not {capacity}")
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, not {max_bytes}")
        self.instance = instance
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._tail: deque[tuple[EventBatch, int]] = deque()
        self._tail_bytes = 0
        self._seq = 0
        self._subscriptions: set[Subscription] = set()

    @property
    def seq(self) -> int:
        """The number of the newest batch, 0 before the first."""
        return self._seq

    @property
    def oldest(self) -> int:
        """The number of the oldest batch still kept; `seq + 1` when none is."""
        return self._seq + 1 - len(self._tail)

    @property
    def tail_bytes(self) -> int:
        """What the kept batches weigh, roughly, in bytes."""
        return self._tail_bytes

    @property
    def subscribers(self) -> int:
        """How many subscriptions are open."""
        return len(self._subscriptions)

    def append(self, events: Iterable[KVEvent]) -> EventBatch | None:
        """Numbers the events of one step as one batch and wakes the subscribers. None when there are no events."""
        changed = tuple(events)
        if not changed:
            return None
        self._seq += 1
        batch = EventBatch(self.instance, self._seq, changed)
        weight = sum(_weight(event) for event in changed)
        self._tail.append((batch, weight))
        self._tail_bytes += weight
        while self._tail and (len(self._tail) > self._capacity or self._tail_bytes > self._max_bytes):
            self._tail_bytes -= self._tail.popleft()[1]
        for subscription in list(self._subscriptions):
            subscription._wake()
        return batch

    def replay(self, after: int, limit: int | None = None) -> list[EventBatch] | None:
        """Batches `after + 1` and on, at most `limit`. None when they are not all there any more, or never were."""
        if after < self.oldest - 1 or after > self._seq:
            return None
        skipped = after + 1 - self.oldest
        stop = len(self._tail) if limit is None else min(len(self._tail), skipped + limit)
        # Subscribers mostly ask for the last batch or two: deques index fast only near their ends.
        return [self._tail[position][0] for position in range(skipped, stop)]

    def snapshot(self, tiers: dict[str, bytes]) -> Snapshot:
        """A snapshot as of the newest batch. `tiers` must be what the worker held right after it."""
        return Snapshot(self.instance, self._seq, tiers)

    def heartbeat(self) -> Heartbeat:
        """Says that nothing happened after the newest batch."""
        return Heartbeat(self.instance, self._seq)

    def subscribe(self, instance: str | None, after: int | None, notify: Callable[[], None]) -> Subscription:
        """A place in the log for somebody who has seen batch `after` of the worker life `instance`.

        Anything else than a batch of this life that the log can continue from starts with a snapshot. `notify` is called
        when there is something to read after `read` returned nothing; it must not block.
        """
        known = instance == self.instance and after is not None and self.replay(after, limit=0) is not None
        subscription = Subscription(self, after if known else None, notify)
        self._subscriptions.add(subscription)
        return subscription

    def _forget(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)


class Subscription:
    """One subscriber's place in an `EventLog`. Close it when the subscriber goes."""

    def __init__(self, log: EventLog, place: int | None, notify: Callable[[], None]) -> None:
        self._log = log
        self._place = place
        self._notify = notify
        self._armed = False

    @property
    def needs_snapshot(self) -> bool:
        """True when only a snapshot helps: `read` returns nothing until one is given."""
        return self._place is None or self._log.replay(self._place, limit=0) is None

    def read(self, limit: int) -> list[EventBatch]:
        """The next batches, at most `limit`, and moves on. Empty: wait for `notify`, unless `needs_snapshot`."""
        batches = None if self._place is None else self._log.replay(self._place, limit)
        if batches is None:
            self._place = None
            return []
        if batches:
            self._place = batches[-1].seq
        else:
            self._armed = True
        return batches

    def give(self, snapshot: Snapshot) -> None:
        """Moves on to what follows `snapshot`. One that is older than the tail leaves `needs_snapshot` True."""
        if snapshot.instance != self._log.instance:
            raise ValueError(f"this is the log of instance {self._log.instance}, the snapshot is of {snapshot.instance}")
        self._place = snapshot.seq

    def close(self) -> None:
        """Gives the place up; idempotent."""
        self._log._forget(self)

    def _wake(self) -> None:
        if self._armed:
            self._armed = False
            self._notify()


def _weight(event: KVEvent) -> int:
    return _EVENT_OVERHEAD if isinstance(event, AllCleared) else _EVENT_OVERHEAD + len(event.digests)
