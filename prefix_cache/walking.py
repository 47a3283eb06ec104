"""The longest resident prefix of a prompt, for all workers at once.

A short prompt is walked block by block: AND the sets of holders until nobody is left. In a long one every `JUMP`-th block is
looked at; where the holders have become fewer, the place is found by bisection in between. Where but a few workers hold its
first block, as is so for most sessions, each one's end is found by bisection alone, among the same blocks first. All of this
takes for granted that who holds a block holds what is before it, which is so in every cache that gives up the end of a sequence
before its beginning. A worker that was found not to do so is named in `careful`, and while it may hold something the whole
prompt is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np

from prefix_cache.hashing import DIGEST_BYTES, BlockHash, JoinedDigests
from prefix_cache.holders import SLOT_BITS

JUMP = 32
WALKED = 96
"""Prompts of up to this many blocks are walked block by block."""

_FEW = 4  # holders: for each of them a bisection takes about a dozen looks, and leaping takes one for every JUMP blocks

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


def jump(
    masks: Mapping[BlockHash, int],
    digests: Sequence[BlockHash],
    alive: int,
    fold: Fold,
    note: Note,
    bits: int = SLOT_BITS,
) -> None:
    """The same by leaps. Needs holders of a block to hold what is before it. `bits`: those of a slot that `fold` folds."""
    at = reader(digests)
    first = masks.get(at(0))
    alive = alive & fold(first) if first is not None else 0
    if alive.bit_count() > _FEW:
        _leap(masks, digests, alive, fold, note, bits)
        return
    while alive:
        one = alive & -alive
        note(one, _reach(masks, at, len(digests), bits * one))
        alive ^= one


def depth(masks: Mapping[BlockHash, int], digests: Sequence[BlockHash], upto: int, bits: int) -> int:
    """How many of the first `upto` blocks have one of `bits`, by bisection."""
    at = reader(digests)
    low, high = 0, upto
    if upto and masks.get(at(upto - 1), 0) & bits:
        return upto
    while low < high:
        middle = (low + high + 1) // 2
        if masks.get(at(middle - 1), 0) & bits:
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


def reader(digests: Sequence[BlockHash]) -> Callable[[int], BlockHash]:
    """Gives the digest at a position from 0 on: lookups ask for dozens, and asking the sequence takes longer than looking."""
    if isinstance(digests, JoinedDigests):
        joined = digests.joined
        return lambda at: joined[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
    return digests.__getitem__


def _reach(masks: Mapping[BlockHash, int], at: Callable[[int], BlockHash], count: int, bits: int) -> int:
    """How many of `count` blocks have one of `bits`; the first has."""
    last = count - 1
    if masks.get(at(last), 0) & bits:
        return count
    # Predictions stand on the blocks that are leapt to, so these come first.
    low, high = 0, last // JUMP + (last % JUMP > 0)
    while high - low > 1:
        middle = (low + high) // 2
        if masks.get(at(middle * JUMP), 0) & bits:
            low = middle
        else:
            high = middle
    low, high = low * JUMP, min(high * JUMP, last)
    while high - low > 1:
        middle = (low + high) // 2
        if masks.get(at(middle), 0) & bits:
            low = middle
        else:
            high = middle
    return high


def _leap(masks: Mapping[BlockHash, int], digests: Sequence[BlockHash], alive: int, fold: Fold, note: Note, bits: int) -> None:
    """For many holders: `alive` hold the first block."""
    at = reader(digests)
    last = len(digests) - 1
    same = None
    for number, mask in enumerate(map(masks.get, every(digests, JUMP))):
        if mask is same:
            continue
        left = alive & fold(mask) if mask is not None else 0
        if left != alive:
            _narrow(masks, at, (number - 1) * JUMP, number * JUMP, alive, left, fold, note, bits)
            if not left:
                return
            alive = left
        same = mask
    if last % JUMP:
        mask = masks.get(at(last))
        left = alive & fold(mask) if mask is not None else 0
        if left != alive:
            _narrow(masks, at, last - last % JUMP, last, alive, left, fold, note, bits)
        alive = left
    if alive:
        note(alive, last + 1)


def _narrow(
    masks: Mapping[BlockHash, int],
    at: Callable[[int], BlockHash],
    low: int,
    high: int,
    alive: int,
    left: int,
    fold: Fold,
    note: Note,
    bits: int,
) -> None:
    """Between block `low`, which `alive` hold, and `high`, which only `left` of them do, finds where the others end."""
    gone = alive ^ left
    if not gone & (gone - 1):
        # One worker, as most often: its bits are cheaper to look at than everybody's.
        bits *= gone
        while high - low > 1:
            middle = (low + high) // 2
            if masks.get(at(middle), 0) & bits:
                low = middle
            else:
                high = middle
    if high - low == 1:
        note(gone, high)
        return
    middle = (low + high) // 2
    mask = masks.get(at(middle))
    there = alive & fold(mask) if mask is not None else 0
    there |= left  # Who holds a later block holds this one.
    if there != alive:
        _narrow(masks, at, low, middle, alive, there, fold, note, bits)
    if there != left:
        _narrow(masks, at, middle, high, there, left, fold, note, bits)
