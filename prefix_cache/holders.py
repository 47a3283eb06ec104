"""Sets of (worker, tier) as one integer: a few bits for every worker, and what can be asked of them."""

from __future__ import annotations

from prefix_cache.events import DEVICE, DISK, HOST

REMOTE = "remote"
TIERS = (DEVICE, HOST, DISK, REMOTE)
"""Tiers the index tells apart, fastest first. Blocks in any other tier are not indexed."""

TIER_BIT = {tier: number for number, tier in enumerate(TIERS)}
PREDICTED = len(TIERS)
STRIDE = len(TIERS) + 1
SLOT_BITS = (1 << STRIDE) - 1
REPORTED_BITS = (1 << PREDICTED) - 1


def fold(mask: int) -> int:
    """Moves 'in any tier, or predicted' of every slot to its lowest bit; the other bits are meaningless."""
    return mask | mask >> 1 | mask >> 2 | mask >> 3 | mask >> 4


def fold_upto(mask: int, tier: int) -> int:
    """The same for 'reported in one of the tiers up to this number'."""
    folded = mask
    for number in range(1, tier + 1):
        folded |= mask >> number
    return folded
