"""Which blocks belong to which session, and what becomes of them while it is away.

When a turn ends its blocks are idle. When a gateway says that the session waits for a tool and when it will be back, they are
worth keeping in that order, on the device and in every tier, and what lies on disk only is brought into memory before that.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.offloading import Offloading
from engine.prefetching import FETCH_AT, Named, Prefetching
from engine.session_door import common_blocks
from engine.session_numbers import session_number
from gateway.workers.protocol import RetentionHint
from prefix_cache.block_pool import BlockPool
from prefix_cache.hashing import BlockHash, JoinedDigests, as_joined
from prefix_cache.worth import IDLE, PINNED, SUPERSEDED, WAITING

MAX_BYTES = 64 << 20
"""Of names of blocks; the sessions that were here longest ago are forgotten beyond it."""

_MAX_SESSIONS = 100_000


class SessionBlocks:
    """Belongs to the engine thread. Times are of `clock`."""

    def __init__(
        self, pool: BlockPool, tiers: Offloading | None, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.prefetching = None if tiers is None else Prefetching(pool, tiers, self.names, clock)
        self.lost_blocks = 0
        """Blocks that a session came back for and that nothing had any more."""
        self._pool = pool
        self._tiers = tiers
        self._max_bytes = max_bytes
        self._clock = clock
        self._sessions: OrderedDict[int, JoinedDigests] = OrderedDict()
        self._roots: dict[int, BlockHash] = {}
        self._first_arrivals: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def seniority(self, session: int, arrival: int, overtakes: int) -> int:
        """The arrival of the session's first turn, for the turn that is arrival number `arrival`; but none older than
        `overtakes` arrivals ago, so that nobody is overtaken by more than that. Program-level first come, first served
        (Continuum, arXiv 2511.02230)."""
        first = self._first_arrivals.setdefault(session, arrival) if session else arrival
        if len(self._first_arrivals) > _MAX_SESSIONS:
            self._first_arrivals.popitem(last=False)
        return max(first, arrival - overtakes)

    def names(self, session: int) -> Named | None:
        """The blocks of a session's last turn; None when it is not known."""
        digests = self._sessions.get(session)
        return None if digests is None else Named(self._roots[session], digests)

    def arrives(self, session: int) -> None:
        """A turn of the session is here, and will begin when its time comes."""
        if session and self.prefetching is not None:
            self.prefetching.arrives(session)

    def began(self, session: int, digests: Sequence[BlockHash], held: int) -> None:
        """A turn of the session has begun; the first `held` of its blocks were not computed."""
        before = self._sessions.get(session)
        if before is not None:
            self.lost_blocks += max(0, common_blocks(before, digests) - held)

    def ended(self, session: int, root: BlockHash, digests: Sequence[BlockHash]) -> None:
        """A turn of the session has ended, with these blocks; `root` is the parent of the first."""
        digests = as_joined(digests)
        if session:
            self._forget(session)
            self._sessions[session] = digests
            self._roots[session] = root
            self._bytes += len(digests.joined)
            while self._bytes > self._max_bytes:
                self._forget(next(iter(self._sessions)))
        self._mark(digests, IDLE, 0.0, session)

    def pauses(self, session: int) -> None:
        """It will be back, but not before others have ended: its blocks go before theirs."""
        digests = self._sessions.get(session)
        if digests is not None:
            self._mark(digests, IDLE, 0.0, session)
        if self.prefetching is not None:
            self.prefetching.forget(session)

    def told(self, hint: RetentionHint) -> None:
        """What a gateway says of a session; of one that is not known it is ignored."""
        session = session_number(hint.tenant, hint.session)
        if hint.state == "closed":
            self._first_arrivals.pop(session, None)
        digests = self._sessions.get(session)
        if digests is None:
            return
        now = self._clock()
        if hint.state == "prefetch":
            if self._tiers is not None:
                self._tiers.promote(digests)
            if self.prefetching is not None:
                self.prefetching.asked(session)
        elif hint.state == "closed":
            self._forget(session)
            if self.prefetching is not None:
                self.prefetching.forget(session)
            self._mark(digests, SUPERSEDED, 0.0, session)
        elif hint.state == "released":
            self._mark(digests, IDLE, 0.0, session)
        elif hint.ttl is not None and hint.ttl > 0:
            self._mark(digests, PINNED, now + hint.ttl, session)
        elif hint.return_p90 is not None:
            self._mark(digests, WAITING, now + hint.return_p90, session)
            if self._tiers is not None and hint.return_p50 is not None:
                self._tiers.promote_at(now + FETCH_AT * hint.return_p50, digests)
            if self.prefetching is not None and hint.return_p50 is not None:
                self.prefetching.waits(session, hint.return_p50, hint.return_p90)

    def _forget(self, session: int) -> None:
        if session in self._sessions:
            self._bytes -= len(self._sessions.pop(session).joined)
            del self._roots[session]

    def _mark(self, digests: JoinedDigests, standing: int, expected: float, session: int) -> None:
        self._pool.mark(digests, standing, expected=expected, session=session)
        if self._tiers is not None:
            self._tiers.mark(digests, standing, expected=expected, session=session)
