"""How long sessions are away between turns, and what workers are told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gateway.turn import Turn
from gateway.workers.protocol import RetentionHint
from sessions.gaps.model import GapConfig, ToolGapModel
from sessions.gaps.waiting import MAX_SKEW, Waiting, away_elsewhere
from sessions.records import SessionRecord

Retain = Callable[[str, RetentionHint], None]
"""Told (worker, hint)."""


class GapWatch:
    """Use on one event loop."""

    def __init__(
        self,
        config: GapConfig,
        retain: Retain,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.model = ToolGapModel(config, clock=clock)
        self._waiting = Waiting(config.max_waiting, clock=clock, wall_clock=wall_clock)
        self._retain = retain
        self._wall_clock = wall_clock

    def began(self, tenant: str, session: str, record: SessionRecord | None) -> None:
        """A turn of the session is here. `record`: the session as it was stored last."""
        away = self._waiting.began(tenant, session)
        if record is not None and (away is None or record.used_at > away.ended_at + MAX_SKEW):
            # Another gateway has served a turn since, or this one was started again.
            away = None if record.called is None else away_elsewhere(record.used_at, self._wall_clock(), record.called)
        if away is not None:
            self.model.observe(tenant, away.tools, away.seconds)

    def closed(self, tenant: str, session: str) -> None:
        """The session will not be back."""
        self._waiting.closed(tenant, session)

    def ended(self, turn: Turn, session: str, worker: str, tools: Sequence[str]) -> None:
        """A turn of the session was answered, and called `tools`."""
        tenant, final = turn.session.tenant, turn.session.final
        if final:
            self._retain(worker, RetentionHint(session=session, tenant=tenant, request_id=turn.request_id, state="closed"))
            return
        self._waiting.ended(tenant, session, tools)
        expected = self.model.predict(tenant, tools)
        hint = RetentionHint(
            session=session,
            tenant=tenant,
            request_id=turn.request_id,
            tools=tuple(dict.fromkeys(name[:128] for name in tools))[:64],
            return_p50=expected.p50 if expected is not None else None,
            return_p90=expected.p90 if expected is not None else None,
            weight=expected.weight if expected is not None else 0.0,
            ttl=turn.session.ttl,
        )
        self._retain(worker, hint)
