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

from prefix_cache.hashing import DIGEST_BYTES, BlockHash, JoinedDigests, join_digests
from prefix_cache.holders import SLOT_BITS

JUMP = 32
WALKED = 96
"""Prompts of up to this many blocks are walked block by block."""

_FEW = 4  # holders: for each of them a bisection takes about a dozen looks, and leaping takes one for every JUMP blocks

Fold = Callable[[int], int]
Ends = list[tuple[int, int]]
"""(holders, count): these hold exactly this many blocks."""


def walk(masks: Mapping[BlockHash, int], digests: Sequence[BlockHash], alive: int, fold: Fold) -> Ends:
    """Block by block. `alive`: the lowest bits of the slots in question."""
    ends: Ends = []
    count = 0
    for mask, run in groupby(map(masks.get, digests)):
        left = alive & fold(mask) if mask is not None else 0
        if left != alive:
            if count:
                ends.append((alive & ~left, count))
            if not left:
                return ends
            alive = left
        count += len(list(run))  # The whole run of equal sets is walked in C.
    if count and alive:
        ends.append((alive, count))
    return ends


def jump(masks: Mapping[BlockHash, int], digests: Sequence[BlockHash], alive: int, fold: Fold, bits: int = SLOT_BITS) -> Ends:
    """The same by leaps. Needs holders of a block to hold what is before it. `bits`: those of a slot that `fold` folds."""
    joined = _joined(digests)
    first = masks.get(joined[:DIGEST_BYTES])
    alive = alive & fold(first) if first is not None else 0
    if alive.bit_count() > _FEW:
        return _leap(masks, joined, alive, fold, bits)
    ends: Ends = []
    while alive:
        one = alive & -alive
        ends.append((one, _reach(masks, joined, bits * one)))
        alive ^= one
    return ends


def depth(masks: Mapping[BlockHash, int], digests: Sequence[BlockHash], upto: int, bits: int) -> int:
    """How many of the first `upto` blocks have one of `bits`, by bisection."""
    if not upto:
        return 0
    joined = _joined(digests)
    if masks.get(joined[(upto - 1) * DIGEST_BYTES : upto * DIGEST_BYTES], 0) & bits:
        return upto
    return _end(masks, joined, -1, upto - 1, bits)


def every(digests: Sequence[BlockHash], step: int) -> Sequence[BlockHash]:
    """Every `step`-th of them, the first among them."""
    return _every(digests.joined, step) if isinstance(digests, JoinedDigests) else digests[::step]


def reader(digests: Sequence[BlockHash]) -> Callable[[int], BlockHash]:
    """Gives the digest at a position from 0 on, at less cost than the sequence does."""
    if isinstance(digests, JoinedDigests):
        joined = digests.joined
        return lambda at: joined[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
    return digests.__getitem__


def _joined(digests: Sequence[BlockHash]) -> bytes:
    return digests.joined if isinstance(digests, JoinedDigests) else join_digests(digests)


def _every(joined: bytes, step: int) -> list[BlockHash]:
    taken: list[BlockHash] = np.frombuffer(joined, f"V{DIGEST_BYTES}")[::step].tolist()
    return taken


def _end(masks: Mapping[BlockHash, int], joined: bytes, low: int, high: int, bits: int, step: int = DIGEST_BYTES) -> int:
    """Between block `low`, which has one of `bits`, and `high`, which has none, the first that has none. In `step` bytes."""
    while high - low > 1:
        middle = (low + high) // 2
        at = middle * step
        if masks.get(joined[at : at + DIGEST_BYTES], 0) & bits:
            low = middle
        else:
            high = middle
    return high


def _reach(masks: Mapping[BlockHash, int], joined: bytes, bits: int) -> int:
    """How many blocks have one of `bits`; the first has."""
    if masks.get(joined[-DIGEST_BYTES:], 0) & bits:
        return len(joined) // DIGEST_BYTES
    last = len(joined) // DIGEST_BYTES - 1
    # Predictions stand on the blocks that are leapt to, so these come first.
    leap = _end(masks, joined, 0, last // JUMP + (last % JUMP > 0), bits, JUMP * DIGEST_BYTES)
    return _end(masks, joined, (leap - 1) * JUMP, min(leap * JUMP, last), bits)


def _leap(masks: Mapping[BlockHash, int], joined: bytes, alive: int, fold: Fold, bits: int) -> Ends:
    """For many holders: `alive` hold the first block."""
    ends: Ends = []
    last = len(joined) // DIGEST_BYTES - 1
    same = None
    for number, mask in enumerate(map(masks.get, _every(joined, JUMP))):
        if mask is same:
            continue
        left = alive & fold(mask) if mask is not None else 0
        if left != alive:
            gone, low = alive ^ left, (number - 1) * JUMP
            if gone & (gone - 1):
                _narrow(masks, joined, low, low + JUMP, alive, left, fold, bits, ends)
            else:
                ends.append((gone, _end(masks, joined, low, low + JUMP, bits * gone)))
            if not left:
                return ends
            alive = left
        same = mask
    if last % JUMP:
        mask = masks.get(joined[-DIGEST_BYTES:])
        left = alive & fold(mask) if mask is not None else 0
        if left != alive:
            _narrow(masks, joined, last - last % JUMP, last, alive, left, fold, bits, ends)
        alive = left
    if alive:
        ends.append((alive, last + 1))
    return ends


def _narrow(
    masks: Mapping[BlockHash, int],
    joined: bytes,
    low: int,
    high: int,
    alive: int,
    left: int,
    fold: Fold,
    bits: int,
    ends: Ends,
) -> None:
    """Between block `low`, which `alive` hold, and `high`, which only `left` of them do, finds where the others end."""
    gone = alive ^ left
    if not gone & (gone - 1):
        # One worker, as most often: its bits are cheaper to look at than everybody's.
        ends.append((gone, _end(masks, joined, low, high, bits * gone)))
        return
    if high - low == 1:
        ends.append((gone, high))
        return
    middle = (low + high) // 2
    mask = masks.get(joined[middle * DIGEST_BYTES : (middle + 1) * DIGEST_BYTES])
    there = alive & fold(mask) if mask is not None else 0
    there |= left  # Who holds a later block holds this one.
    if there != alive:
        _narrow(masks, joined, low, middle, alive, there, fold, bits, ends)
    if there != left:
        _narrow(masks, joined, middle, high, there, left, fold, bits, ends)
