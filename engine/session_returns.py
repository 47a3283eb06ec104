"""Whether sessions come back at all.

How long sessions were away is known of those that came back; of one-turn sessions nothing is known that way, and they would be
waited for in vain. So this counts, by kind, how many were back in time and how many were not.

Pure: time is given to it.
"""

from __future__ import annotations

from collections import OrderedDict

Kind = tuple[bool, bool]
"""Whether the turn called tools, and whether the session has been back before."""

_MAX_AWAY = 10_000
"""Sessions that are waited for; of more, what became of those that left first is not counted."""

_PRIOR = 4.0
"""Sessions that what is expected without any weighs as much as."""

_REMEMBERED = 64.0
"""Sessions of a kind; those before count for half, and so on."""

_LATELY = 8
"""New sessions of which are_likely is a mean."""


class Returns:
    """Times are seconds of one clock."""

    def __init__(self) -> None:
        self._away: OrderedDict[int, tuple[float, Kind]] = OrderedDict()
        self._back: dict[Kind, float] = {}
        self._gone: dict[Kind, float] = {}
        self._likely = 1.0

    @property
    def are_likely(self) -> bool:
        """False when most that were new lately were not expected back after their first turn."""
        return self._likely >= 0.5

    def leaves(self, session: int, kind: Kind, until: float, *, expects: bool) -> bool:
        """The session is away. True when those of its kind are mostly back by their `until`. `expects`: what to think of them
        as long as few were seen."""
        self._away.pop(session, None)
        self._away[session] = until, kind
        if len(self._away) > _MAX_AWAY:
            self._away.popitem(last=False)
        back, gone = self._back.get(kind, 0.0), self._gone.get(kind, 0.0)
        stays = back + _PRIOR * expects >= gone + _PRIOR * (not expects)
        if not kind[1]:
            self._likely += (stays - self._likely) / _LATELY
        return stays

    def arrives(self, session: int, now: float) -> bool:
        """A turn of the session is here. True when that was away, however long."""
        # Not all that are over are looked at: one that left early and may be away for long keeps those behind it.
        while self._away:
            oldest = next(iter(self._away))
            until, kind = self._away[oldest]
            if until >= now or oldest == session:
                break
            del self._away[oldest]
            self._count(self._gone, kind)
        known = self._away.pop(session, None)
        if known is None:
            return False
        until, kind = known
        self._count(self._back if now <= until else self._gone, kind)
        return True

    def forget(self, session: int) -> None:
        """Somebody has said that it will not be back, which is neither."""
        self._away.pop(session, None)

    def _count(self, ends: dict[Kind, float], kind: Kind) -> None:
        ends[kind] = ends.get(kind, 0.0) + 1.0
        if self._back.get(kind, 0.0) + self._gone.get(kind, 0.0) > _REMEMBERED:
            for each in (self._back, self._gone):
                each[kind] = each.get(kind, 0.0) / 2
