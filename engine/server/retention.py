"""Sessions that wait for a tool, as gateways told: when each is expected back. Bounded, the longest away first out.

It is recorded here and shown; the engine does with it what engine/session_blocks.py says.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway.workers.protocol import RetentionHint, WaitingSession, WaitingSessions

MAX_SESSIONS = 10_000
MAX_SHOWN = 1000

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Waiting:
    hint: RetentionHint
    since: float


class WaitingTable:
    """By (tenant, session). Times are of `clock`, monotonic. Use on one event loop."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_sessions
        self._clock = clock
        self._sessions: OrderedDict[_Key, _Waiting] = OrderedDict()
        self.hints = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def told(self, hint: RetentionHint) -> None:
        """A turn ended."""
        self.hints += 1
        if hint.state == "prefetch":
            return
        key = (hint.tenant, hint.session)
        self._sessions.pop(key, None)
        if hint.state == "waiting":
            self._sessions[key] = _Waiting(hint, self._clock())
            if len(self._sessions) > self._max:
                self._sessions.popitem(last=False)

    def returned(self, tenant: str, session: str | None) -> None:
        """A request of the session is here."""
        if session is not None:
            self._sessions.pop((tenant, session), None)

    def shown(self) -> WaitingSessions:
        """Those that wait, the longest away first; MAX_SHOWN at most."""
        now = self._clock()
        found: list[WaitingSession] = []
        for waiting in self._sessions.values():
            if len(found) >= MAX_SHOWN:
                break
            found.append(WaitingSession(waiting.hint, now - waiting.since))
        return WaitingSessions(tuple(found), self.hints)
