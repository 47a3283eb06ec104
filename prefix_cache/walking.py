"""The longest resident prefix of a prompt, for all workers at once.

A short prompt is walked block by block: AND the sets of holders until nobody is left. In a long one every `JUMP`-th block is
looked at; where the holders have become fewer, the place is found by bisection in between. That takes for granted that who
holds a block holds what is before it, which is so in every cache that gives up the end of a sequence before its beginning. A
worker that was found not to do so is named in `careful`, and while it may hold something the whole prompt is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np

from prefix_cache.hashing import DIGEST_BYTES, BlockHash, JoinedDigests
from prefix_cache.holders import SLOT_BITS
from prefix_cache.holders import fold as fold_all

JUMP = 32
WALKED = 96
"""Prompts of up to this many blocks are walked block by block."""

Fold = Callable[[int], int]
Note = Callable[[int, int], None]
"""Told (holders, count): these hold exactly this many blocks."""


def walk(masks: Mapping[BlockHash, int], digests: Sequence[BlockHash], alive: int, fold: Fold, note: Note) -> None:
    """Block by block. `alive`: the lowest bits of the slots in question."""
    count = 0
    for mask, run in groupby(map(masks.get, digests)):
        left = alive & fold(mask) if mask is not None else 0
        if left != alive:
            if count:
                note(alive & ~left, count)
            if not left:
                return
            alive = left
        count += len(list(run))  # The whole run of equal sets is walked in C.
    if count and alive:
        note(alive, count)


def jump(masks: Mapping[BlockHash, int], digests: Sequence[BlockHash], alive: int, fold: Fold, note: Note) -> None:
    """The same by leaps. Needs holders of a block to hold what is before it."""
    last = len(digests) - 1
    before, same = -1, None
    for number, mask in enumerate(map(masks.get, every(digests, JUMP))):
        at = number * JUMP
        if mask is same and mask is not None:
            before = at
            continue
        left = alive & fold(mask) if mask is not None else 0
        if left != alive:
            _narrow(masks, digests, before, at, alive, left, fold, note)
            if not left:
                return
            alive = left
        before, same = at, mask
    if before < last:
        mask = masks.get(digests[last])
        left = alive & fold(mask) if mask is not None else 0
        if left != alive:
            _narrow(masks, digests, before, last, alive, left, fold, note)
        alive = left
    if alive:
        note(alive, last + 1)


def depth(masks: Mapping[BlockHash, int], digests: Sequence[BlockHash], upto: int, bits: int) -> int:
    """How many of the first `upto` blocks have one of `bits`, by bisection."""
    low, high = 0, upto
    while low < high:
        middle = (low + high + 1) // 2
        if masks.get(digests[middle - 1], 0) & bits:
            low = middle
        else:
            high = middle - 1
    return low


def every(digests: Sequence[BlockHash], step: int) -> Sequence[BlockHash]:
    """Every `step`-th of them, the first among them."""
    if isinstance(digests, JoinedDigests):
        taken: list[BlockHash] = np.frombuffer(digests.joined, f"V{DIGEST_BYTES}")[::step].tolist()
        return taken
    return digests[::step]


def _narrow(
    masks: Mapping[BlockHash, int],
    digests: Sequence[BlockHash],
    low: int,
    high: int,
    alive: int,
    left: int,
    fold: Fold,
    note: Note,
) -> None:
    """Between block `low`, which `alive` hold, and `high`, which only `left` of them do, finds where the others end."""
    gone = alive & ~left
    if not gone & (gone - 1):
        # One worker, as most often: its bits are cheaper to look at than everybody's.
        bits = SLOT_BITS << gone.bit_length() - 1 if fold is fold_all else 0
        if bits:
            while high - low > 1:
                middle = (low + high) // 2
                if masks.get(digests[middle], 0) & bits:
                    low = middle
                else:
                    high = middle
    if high - low == 1:
        if high:
            note(gone, high)
        return
    middle = (low + high) // 2
    mask = masks.get(digests[middle])
    there = alive & fold(mask) if mask is not None else 0
    there |= left  # Who holds a later block holds this one.
    if there != alive:
        _narrow(masks, digests, low, middle, alive, there, fold, note)
    if there != left:
        _narrow(masks, digests, middle, high, there, left, fold, note)
