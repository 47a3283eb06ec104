"""What can go wrong with a tier. None of it reaches a request: losing a tier costs time, never correctness."""

from __future__ import annotations


class TierUnavailable(Exception):  # noqa: N818 - an ordinary answer; serving goes on without the tier
    """The tier cannot be used, now or at all. The message says why and what to do."""


class TierCorrupt(Exception):  # noqa: N818 - found by checks only
    """The books of a tier do not balance. Always a bug: damage from outside is counted and healed instead."""
