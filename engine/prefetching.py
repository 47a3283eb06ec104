"""Bringing blocks of sessions back onto the device before their next turn is there.

A session that waits for a tool may lose its blocks on the device to others. Shortly before it is expected back they are copied
from the fastest tier into blocks that are free or hold what is worth less: what nobody is expected to come back for, and what
sessions hold that are expected later. After KVFlow (arXiv 2507.07400), which fetches what the next step of a workflow needs.

What is being fetched belongs to nobody who runs: as soon as a request needs the room the fetch is called off, and when the
session's turn arrives it goes on from what has come. What has come lies in the pool like any other cached block, and can be
given up like any other.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.tickets import LoadTicket
from prefix_cache.block_pool import BlockPool
from prefix_cache.hashing import BlockHash
from prefix_cache.worth import WAITING

FETCH_AT = 0.5
"""Of the median time away: half of the sessions are back later than that time, hardly any before half of it."""

_MARGIN = 0.5
"""Of the time until a session is back: others must be expected back later by so much, or sessions push each other out."""

_AT_ONCE = 2
_MOST_SESSIONS = 10_000
_TRIES = 6
_PAUSE = 0.1
_STUCK = 5.0
_ASKED_FOR = 10.0
_USEFUL_FOR = 600.0


class Fetching(Protocol):
    """What brings blocks (engine.offloading)."""

    @property
    def is_fast(self) -> bool:
        """True when bringing a block takes less than computing it."""

    def reach(self, digests: Sequence[BlockHash]) -> int:
        """How many of `digests`, counted from the first, can be fetched now."""

    def fetch(self, digests: Sequence[BlockHash], blocks: Sequence[int]) -> LoadTicket:
        """Begins to copy blocks to the device, after those that requests wait for."""


@dataclass(frozen=True, slots=True)
class Named:
    """A session's blocks: `digests` in order, `root` the parent of the first."""

    root: BlockHash
    digests: Sequence[BlockHash]


@dataclass(slots=True)
class _Plan:
    """A session to be fetched from `when` on, expected back at `expected`. The newest plan of a session counts."""

    session: int
    when: float
    expected: float
    number: int
    tries: int = 0


@dataclass(slots=True)
class _Fetch:
    """Blocks of a session from its block `first` on, which lie in `blocks` when `ticket` says so. `parent`: of the first."""

    plan: _Plan
    parent: BlockHash
    blocks: list[int]
    ticket: LoadTicket
    began_at: float


@dataclass(slots=True)
class PrefetchCounts:
    """Blocks, since the start. `useful`: still there when their session's turn came. `useless`: given up before, or nobody
    came. `called_off`: not fetched, since others needed the room or the turn was faster."""

    fetched: int = 0
    useful: int = 0
    useless: int = 0
    called_off: int = 0


class Prefetching:
    """Belongs to the engine thread. Times are of `clock`.

    names: the blocks of a session, None when it is not known any more.
    """

    def __init__(
        self,
        pool: BlockPool,
        tiers: Fetching,
        names: Callable[[int], Named | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = PrefetchCounts()
        self._pool = pool
        self._tiers = tiers
        self._names = names
        self._clock = clock
        self._numbers = itertools.count()
        self._plans: dict[int, _Plan] = {}
        self._due: list[tuple[float, int, int]] = []  # (when, number of the plan, session)
        self._fetches: dict[int, _Fetch] = {}
        self._brought: OrderedDict[int, tuple[float, tuple[BlockHash, ...]]] = OrderedDict()

    @property
    def held(self) -> Iterable[int]:
        """Blocks that are being fetched into: each is referenced once."""
        return (block for fetch in self._fetches.values() for block in fetch.blocks)

    # What happens to sessions.

    def waits(self, session: int, return_p50: float, return_p90: float) -> None:
        """The session is away, and back in these many seconds."""
        now = self._clock()
        self._plan(session, now + FETCH_AT * return_p50, now + return_p90)

    def asked(self, session: int) -> None:
        """Somebody says that it will be here soon."""
        named = self._names(session)
        if named is None:
            return
        now = self._clock()
        known = self._plans.get(session)
        expected = now + _ASKED_FOR if known is None else min(known.expected, now + _ASKED_FOR)
        self._pool.mark(named.digests, WAITING, expected=expected, session=session)
        self._plan(session, now, expected)

    def arrives(self, session: int) -> None:
        """Its turn is here: what has come of a fetch under way can be found from now on."""
        self._end(session)
        self._judge(session)

    def forget(self, session: int) -> None:
        """It will not be back, or not soon."""
        self._end(session)
        self._judge(session, came=False)

    # Between two steps.

    def is_due(self) -> bool:
        """True when `work` would do something."""
        now = self._clock()
        if any(fetch.ticket.done or now - fetch.began_at > _STUCK for fetch in self._fetches.values()):
            return True
        return len(self._fetches) < _AT_ONCE and bool(self._due) and self._due[0][0] <= now

    def due_in(self) -> float | None:
        """Seconds until the next session is to be fetched; None: none, or it waits for others that are."""
        if not self._due or len(self._fetches) >= _AT_ONCE:
            return None
        return max(0.0, self._due[0][0] - self._clock())

    def work(self) -> None:
        """Takes in what has come, and begins what is due."""
        now = self._clock()
        for session, fetch in list(self._fetches.items()):
            if fetch.ticket.done or now - fetch.began_at > _STUCK:
                self._settle(session)
                self._again(fetch.plan, now)
        while self._due and self._due[0][0] <= now and len(self._fetches) < _AT_ONCE:
            _, number, session = heapq.heappop(self._due)
            plan = self._plans.get(session)
            if plan is not None and plan.number == number:
                self._begin(plan, now)
        while self._brought and next(iter(self._brought.values()))[0] < now - _USEFUL_FOR:
            self._judge(next(iter(self._brought)), came=False)

    def give_way(self, blocks: int) -> bool:
        """Somebody who runs lacks `blocks` blocks: fetches are called off until they are there, the session that is back last
        first. True when that gave any."""
        before = self._pool.num_available
        for session in sorted(self._fetches, key=lambda one: -self._fetches[one].plan.expected):
            if self._pool.num_available >= before + blocks:
                break
            fetch = self._fetches[session]
            self._settle(session)
            self._again(fetch.plan, self._clock())
        return self._pool.num_available > before

    def close(self) -> None:
        """Calls everything off."""
        for session in list(self._fetches):
            self._end(session)
        self._plans.clear()
        self._due.clear()

    # How it is done.

    def _plan(self, session: int, when: float, expected: float) -> None:
        self._end(session)
        plan = self._plans[session] = _Plan(session, when, expected, next(self._numbers))
        while len(self._plans) > _MOST_SESSIONS:
            del self._plans[next(iter(self._plans))]
        self._push(plan)

    def _push(self, plan: _Plan) -> None:
        heapq.heappush(self._due, (plan.when, plan.number, plan.session))
        if len(self._due) > 2 * len(self._plans) + 64:
            self._due = [entry for entry in self._due if (one := self._plans.get(entry[2])) and one.number == entry[1]]
            heapq.heapify(self._due)

    def _again(self, plan: _Plan, now: float) -> None:
        """Tries once more later, as long as the session may still come: the room may be there then."""
        if self._plans.get(plan.session) is not plan:
            return
        plan.tries += 1
        plan.when = now + max(_PAUSE, (plan.expected - now) / max(1, _TRIES - plan.tries))
        if plan.tries >= _TRIES or plan.when > plan.expected:
            del self._plans[plan.session]
        else:
            self._push(plan)

    def _begin(self, plan: _Plan, now: float) -> None:
        named = self._names(plan.session)
        if named is None:
            del self._plans[plan.session]
            return
        digests = named.digests
        first = len(self._pool.find(digests))
        wanted = digests[first:]
        count = self._tiers.reach(wanted)
        # Whom a slow fetch displaces may be worth more than what it brings in time.
        threshold = plan.expected + _MARGIN * max(0.0, plan.expected - now) if self._tiers.is_fast else float("inf")
        blocks = self._pool.allocate_spare(count, threshold) if count else []
        if not blocks:
            # It is here already, or there is no room, or nothing that could be fetched yet.
            self._again(plan, now)
            return
        ticket = self._tiers.fetch(wanted[: len(blocks)], blocks)
        parent = digests[first - 1] if first else named.root
        self._fetches[plan.session] = _Fetch(plan, parent, blocks, ticket, now)

    def _end(self, session: int) -> None:
        if session in self._fetches:
            self._settle(session)
        self._plans.pop(session, None)

    def _settle(self, session: int) -> None:
        """Ends a fetch, wherever it is. Its blocks are cached, those that have come, or free."""
        fetch = self._fetches.pop(session)
        loaded = fetch.ticket.cancel()
        digests = fetch.ticket.digests[:loaded]
        if loaded:
            held = self._pool.publish(fetch.blocks[:loaded], digests, fetch.parent)
            self._pool.free([*held, *fetch.blocks[loaded:]])
            self._pool.mark(digests, WAITING, expected=fetch.plan.expected, session=session)
            _, before = self._brought.pop(session, (0.0, ()))
            both = dict.fromkeys((*before, *digests))
            self.counts.useless += len(before) + loaded - len(both)  # given up, and fetched again
            self._brought[session] = (self._clock(), tuple(both))
        else:
            self._pool.free(fetch.blocks)
        self.counts.fetched += loaded
        self.counts.called_off += len(fetch.blocks) - loaded

    def _judge(self, session: int, *, came: bool = True) -> None:
        """Whether what was fetched for a session was worth it: its turn is here, or it will not come."""
        _, digests = self._brought.pop(session, (0.0, ()))
        there = sum(self._pool.block_of(digest) is not None for digest in digests) if came else 0
        self.counts.useful += there
        self.counts.useless += len(digests) - there
