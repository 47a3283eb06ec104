"""What a simulated replica does about sessions between two turns, as the real one does it (engine.session_blocks)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.session_door import common_blocks
from engine.session_numbers import session_number
from engine.simulation.clock import Clock
from engine.simulation.tiers import SimulatedTiers
from gateway.workers.protocol import RetentionHint
from prefix_cache.block_pool import BlockPool
from prefix_cache.hashing import BlockHash, JoinedDigests
from prefix_cache.worth import IDLE, PINNED, SUPERSEDED, WAITING

_MAX_SESSIONS = 20_000
_FETCH_AT = 0.5


class SimulatedSessions:
    """Which blocks belong to whom. Belongs to the engine thread."""

    def __init__(self, pool: BlockPool, tiers: SimulatedTiers | None, clock: Clock) -> None:
        self.lost_blocks = 0
        self._pool = pool
        self._tiers = tiers
        self._clock = clock
        self._sessions: OrderedDict[int, JoinedDigests] = OrderedDict()

    def began(self, session: int, digests: Sequence[BlockHash], held: int) -> None:
        """A turn has begun; the first `held` of its blocks were not computed."""
        before = self._sessions.get(session)
        if before is not None:
            self.lost_blocks += max(0, common_blocks(before, digests) - held)

    def ended(self, session: int, digests: JoinedDigests) -> None:
        """A turn has ended, with these blocks."""
        if session:
            self._sessions.pop(session, None)
            self._sessions[session] = digests
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._mark(digests, IDLE, 0.0, session)

    def told(self, hint: RetentionHint) -> None:
        """What a gateway says; of a session that is not known it is ignored."""
        session = session_number(hint.tenant, hint.session)
        digests = self._sessions.get(session)
        if digests is None:
            return
        now = self._clock.now()
        if hint.state == "prefetch":
            self._promote_at(now, digests)
        elif hint.state == "closed":
            del self._sessions[session]
            self._mark(digests, SUPERSEDED, 0.0, session)
        elif hint.state == "released":
            self._mark(digests, IDLE, 0.0, session)
        elif hint.ttl is not None and hint.ttl > 0:
            self._mark(digests, PINNED, now + hint.ttl, session)
        elif hint.return_p90 is not None:
            self._mark(digests, WAITING, now + hint.return_p90, session)
            if hint.return_p50 is not None:
                self._promote_at(now + _FETCH_AT * hint.return_p50, digests)

    def _promote_at(self, when: float, digests: Sequence[BlockHash]) -> None:
        if self._tiers is not None:
            self._tiers.promote_at(when, digests)

    def _mark(self, digests: Sequence[BlockHash], standing: int, expected: float, session: int) -> None:
        self._pool.mark(digests, standing, expected=expected, session=session)
        if self._tiers is not None:
            self._tiers.mark(digests, standing, expected=expected, session=session)
