"""The events of one turn as long as somebody may want them, within a bound."""

from __future__ import annotations

from collections import deque

from gateway.choices import ChoiceDelta, TurnEvent
from grammar.deltas import ReasoningDelta, TextDelta, ToolCallArguments

_EVENT_BYTES = 200
_DELTA_BYTES = 100
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 160
_WITH_TEXT = frozenset({TextDelta, ReasoningDelta, ToolCallArguments})


class EventBudget:
    """Bytes of events that all turns together may keep. `free` is what is left of them."""

    def __init__(self, max_bytes: int) -> None:
        self.free = max_bytes


class KeptEvents:
    """Events by their number. `whole`: all since the first are here, so that a stream can begin at its beginning."""

    __slots__ = ("_budget", "_events", "bytes", "first", "max_bytes", "next", "whole")

    def __init__(self, budget: EventBudget, max_bytes: int, *, whole: bool) -> None:
        """`whole`: they are kept from the first one on, until there are more than `max_bytes` or than the budget holds."""
        self._budget = budget
        self._events: deque[tuple[TurnEvent, int]] = deque()
        self.max_bytes = max_bytes
        self.whole = whole
        self.first = 0
        """Number of the oldest that is kept."""
        self.next = 0
        """Number of the one to come."""
        self.bytes = 0
        """Held, estimated."""

    def add(self, event: TurnEvent) -> None:
        """One more. It may turn out that not all can be kept: `whole` is False then, and a `trim` due."""
        size = _size(event)
        self._events.append((event, size))
        self.next += 1
        self.bytes += size
        self._budget.free -= size
        if self.whole and (self.bytes > self.max_bytes or self._budget.free < 0):
            self.whole = False

    def __getitem__(self, number: int) -> TurnEvent:
        return self._events[number - self.first][0]

    def trim(self, needed: int, fastest: int) -> None:
        """Drops what nobody needs: all before `needed`; and where they are too many, what only slow readers need, up to
        `fastest`. Nothing while they are kept whole."""
        if self.whole:
            return
        while self._events and (self.first < needed or (self.bytes > self.max_bytes and self.first < fastest)):
            size = self._events.popleft()[1]
            self.first += 1
            self.bytes -= size
            self._budget.free += size


def _size(event: TurnEvent) -> int:
    if not isinstance(event, ChoiceDelta):
        return _EVENT_BYTES
    size = _EVENT_BYTES + _TOKEN_BYTES * len(event.token_ids)
    for delta in event.deltas:
        size += _DELTA_BYTES
        if type(delta) in _WITH_TEXT:
            size += len(delta.text)  # type: ignore[union-attr]
    for logprob in event.logprobs:
        size += _LOGPROB_BYTES * (1 + len(logprob.top))
    return size
