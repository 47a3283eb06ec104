"""Sessions between two turns: since when they wait, and for which tools."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sessions.gaps.histogram import MAX_SECONDS

MAX_SKEW = 1.0
"""Seconds by which two gateways' wall clocks may part without a gap being thrown away for it."""


class Away(NamedTuple):
    """A session came back after `seconds` from a turn that called `tools` and ended at `ended_at` (Unix seconds)."""

    seconds: float
    tools: tuple[str, ...]
    ended_at: float = 0.0


class Waiting:
    """By (tenant, session), the longest away first out. `clock` is monotonic: what the wall clock does meanwhile is nothing
    to a gap that begins and ends in this process."""

    def __init__(
        self,
        max_sessions: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._max = max_sessions
        self._clock = clock
        self._wall_clock = wall_clock
        self._since: OrderedDict[tuple[str, str], tuple[float, float, tuple[str, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def ended(self, tenant: str, session: str, tools: Sequence[str]) -> None:
        """A turn of the session ended, having called `tools`."""
        self._since.pop((tenant, session), None)
        self._since[tenant, session] = (self._clock(), self._wall_clock(), tuple(tools))
        if len(self._since) > self._max:
            self._since.popitem(last=False)

    def began(self, tenant: str, session: str) -> Away | None:
        """Its next turn is here. None when no turn of it has ended since: the first, or one beside another."""
        known = self._since.pop((tenant, session), None)
        if known is None:
            return None
        since, ended_at, tools = known
        return Away(min(max(0.0, self._clock() - since), MAX_SECONDS), tools, ended_at)

    def closed(self, tenant: str, session: str) -> None:
        """It will not come back."""
        self._since.pop((tenant, session), None)


def away_elsewhere(ended_at: float, now: float, tools: Sequence[str]) -> Away | None:
    """The same for a turn that ended in another process: wall clocks, Unix seconds. None where they cannot be right: the turn
    would have ended later than now by more than clocks part, or longer ago than gaps are counted."""
    seconds = now - ended_at
    if ended_at <= 0 or not -MAX_SKEW <= seconds <= MAX_SECONDS:
        return None
    return Away(max(0.0, seconds), tuple(tools), ended_at)
