"""What can go wrong with a tier. None of it reaches a request: losing a tier costs time, never correctness."""

from __future__ import annotations


class TierUnavailable(Exception):  # noqa: N818 - an ordinary answer; serving goes on without the tier
    """The tier cannot be used, now or at all. The message says why and what to do."""


class TierGone(TierUnavailable):
    """What the tier kept its blocks in was removed or replaced: it has to be opened anew."""


class TierMisconfigured(TierUnavailable):
    """The tier cannot be used with these settings, whatever the system does. The message names the remedy."""


class TierCorrupt(Exception):  # noqa: N818 - found by checks only
    """The books of a tier do not balance. Always a bug: damage from outside is counted and healed instead."""
