"""How far a worker's word about its cache is taken: what the index promised against what the worker then reported.

Every turn that was promised hits gives a share of the promise that was broken. Its running mean moves the worker down a step
at a time, and up again only when it has fallen well below where it went down:

    exact        the index is taken at its word
    approximate  a match counts for the share of promises that was kept lately
    load         matches count for nothing: the worker is chosen by load and home alone

Down or up, the comparison goes on, so a worker earns its way back with the turns it gets for other reasons.
"""

from __future__ import annotations

import logging
from enum import IntEnum

log = logging.getLogger(__name__)

_GAIN = 0.1
_SURE_AFTER = 8
_DOWN = (0.25, 0.6)
_UP = (0.1, 0.35)
_SLACK = 0.02


class Level(IntEnum):
    """How far the index is believed."""

    EXACT = 0
    APPROXIMATE = 1
    LOAD = 2


class Trust:
    """Of one worker. `broken`: running mean of the share of promised tokens that were not there, 0 to 1."""

    __slots__ = ("_name", "_seen", "broken", "changes", "level")

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen = 0
        self.level = Level.EXACT
        self.broken = 0.0
        self.changes = 0

    def believed(self, matched_tokens: int) -> int:
        """What of a match to count on."""
        if self.level is Level.EXACT:
            return matched_tokens
        return 0 if self.level is Level.LOAD else int(matched_tokens * (1.0 - self.broken))

    def compare(self, promised: int, reported: int, slack: int) -> None:
        """`promised` tokens by the index, `reported` by the worker; `slack` tokens less are no contradiction."""
        if promised <= slack:
            return
        missing = promised - reported
        share = missing / promised if missing > max(slack, _SLACK * promised) else 0.0
        self._seen += 1
        self.broken += _GAIN * (share - self.broken)
        if self._seen < _SURE_AFTER:
            return
        level = self.level
        if level < Level.LOAD and self.broken > _DOWN[level]:
            self._move(Level(level + 1))
        elif level > Level.EXACT and self.broken < _UP[level - 1]:
            self._move(Level(level - 1))

    def forget(self) -> None:
        """It is another life of the worker: the past says nothing of it."""
        self._seen, self.broken, self.level = 0, 0.0, Level.EXACT

    def _move(self, level: Level) -> None:
        log.warning(
            "worker %s: its cache index is now taken as '%s' and no longer as '%s': lately %.0f%% of the tokens that it "
            "promised were not there",
            self._name,
            level.name.lower(),
            self.level.name.lower(),
            100 * self.broken,
        )
        self.level = level
        self.changes += 1
