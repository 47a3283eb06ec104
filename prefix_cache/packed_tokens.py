"""Token ids of a prompt that goes on from another, in parts that the two share.

An agent's prompt is the one before with a little more behind it. Of 100k tokens that is 400 kB, and whatever is done with all
of them costs more than the rest of the turn: writing them anew, or hashing them. So packed ids are kept in parts of a fixed
size, as ropes do it: a prompt that goes on from another takes over its full parts and writes only the last one, and a digest
is made from where the last full part ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import xxhash

from prefix_cache.hashing import TOKEN_BYTES, unpack_tokens

PART_BYTES = 32768
"""Of every part but the last. A turn copies half as much on average."""
_PART_OVERHEAD = 64
_STATE_BYTES = 704


class PackedTokens:
    """Token ids as little-endian uint32 (`prefix_cache.hashing.pack_tokens`). Immutable; equal where the ids are. Lengths and
    positions count tokens."""

    __slots__ = ("_states", "nbytes", "parts")

    def __init__(self, packed: bytes = b"") -> None:
        """Raises ValueError when the length is no multiple of four."""
        self._take(_split(packed), len(packed), ())

    def _take(self, parts: tuple[bytes, ...], nbytes: int, states: tuple[xxhash.xxh3_128, ...]) -> None:
        if nbytes % TOKEN_BYTES:
            raise ValueError(f"packed token ids take {TOKEN_BYTES} bytes each; {nbytes} bytes are no whole number of ids")
        self.parts = parts
        """All but the last have PART_BYTES."""
        self.nbytes = nbytes
        """Of the ids."""
        self._states = states  # of a hasher behind each of the first parts, as far as digests were asked for

    @property
    def held_bytes(self) -> int:
        """About what it takes in memory, were nothing of it shared."""
        return self.nbytes + _PART_OVERHEAD * len(self.parts) + _STATE_BYTES * len(self._states)

    def __len__(self) -> int:
        return self.nbytes // TOKEN_BYTES

    def whole(self) -> bytes:
        """All of them, back to back; copied where there are several parts."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def part(self, start: int, end: int | None = None) -> bytes:
        """The ids from `start` to `end` (None: the last), packed. Both are positions from 0 on; there may be fewer ids."""
        first = start * TOKEN_BYTES
        last = self.nbytes if end is None else min(end * TOKEN_BYTES, self.nbytes)
        if first >= last:
            return b""
        low, high = first // PART_BYTES, (last - 1) // PART_BYTES
        if low == high:
            return self.parts[low][first - low * PART_BYTES : last - low * PART_BYTES]
        head = memoryview(self.parts[low])[first - low * PART_BYTES :]
        tail = memoryview(self.parts[high])[: last - high * PART_BYTES]
        return b"".join((head, *self.parts[low + 1 : high], tail))

    def extended(self, kept: int, ids: Iterable[bytes]) -> PackedTokens:
        """The first `kept` ids and the packed `ids` behind them. What is full is shared. Raises ValueError for half an id."""
        end = min(kept * TOKEN_BYTES, self.nbytes)
        full, rest = divmod(end, PART_BYTES)
        begun = (memoryview(self.parts[full])[:rest],) if rest else ()
        new = _split(b"".join((*begun, *ids)))
        grown = PackedTokens.__new__(PackedTokens)
        grown._take(self.parts[:full] + new, full * PART_BYTES + sum(map(len, new)), self._states[:full])
        return grown

    def starts_with(self, other: PackedTokens) -> bool:
        """Whether all ids of `other` are the first of these."""
        return other.nbytes <= self.nbytes and self.common(other) == len(other)

    def common(self, other: PackedTokens) -> int:
        """How many ids both begin with. Parts that they share are not looked at."""
        for at, (mine, theirs) in enumerate(zip(self.parts, other.parts, strict=False)):
            if mine is theirs or mine == theirs:
                continue
            one, two = unpack_tokens(mine), unpack_tokens(theirs)
            size = min(len(one), len(two))
            different = (one[:size] != two[:size]).nonzero()[0]
            return at * PART_BYTES // TOKEN_BYTES + (int(different[0]) if len(different) else size)
        return min(len(self), len(other))

    def digest(self, count: int) -> bytes:
        """The xxh3-128 digest of the first `count` ids, packed. What it or those it goes on from were asked before is not
        hashed again, up to the last full part."""
        end = min(count * TOKEN_BYTES, self.nbytes)
        full, rest = divmod(end, PART_BYTES)
        states = self._states
        if len(states) < full:
            state, more = states[-1] if states else xxhash.xxh3_128(), []
            for part in self.parts[len(states) : full]:
                state = state.copy()
                state.update(part)
                more.append(state)
            self._states = states = (*states, *more)
        state = states[full - 1].copy() if full else xxhash.xxh3_128()
        if rest:
            state.update(memoryview(self.parts[full])[:rest])
        return state.digest()

    def __eq__(self, other: object) -> bool:
        return self.parts == other.parts if isinstance(other, PackedTokens) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return f"PackedTokens({len(self)} ids)"


def _split(packed: bytes) -> tuple[bytes, ...]:
    """In parts of PART_BYTES, of which the last may have fewer."""
    if len(packed) <= PART_BYTES:
        return (packed,) if packed else ()
    ends = (*range(0, len(packed), PART_BYTES), len(packed))
    return tuple([packed[start:end] for start, end in pairwise(ends)])


NO_TOKENS = PackedTokens()
