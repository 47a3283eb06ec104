"""Which block carries which digest, looked up for thousands of digests at once.

A dictionary knows for certain, but asking it for every block of a long context takes as many Python objects as there are
blocks. So beside it stand arrays: hints of where a digest may be, at a place that its lower half says and at one that its
upper half does, and the digests themselves. A hint is only believed when the block it names carries the digest that is looked
for, all 128 bits of it; the few digests that share both of their places with others are asked of the dictionary.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from prefix_cache.hashing import DIGEST_BYTES, BlockHash, as_joined

_HALVES = struct.Struct("<QQ")
_HINTS_PER_BLOCK = 8
_FEW = 32
"""Digests that the dictionary is faster with."""

_UNKNOWN = -1

_Words = npt.NDArray[np.uint64]


class BlockNames:
    """Blocks 0 to `num_blocks` - 1, each with one digest or none, and each digest with one block."""

    def __init__(self, num_blocks: int) -> None:
        self._digests: list[BlockHash | None] = [None] * num_blocks
        self._blocks: dict[BlockHash, int] = {}
        self._low: npt.NDArray[np.uint64] = np.zeros(num_blocks, dtype=np.uint64)
        self._high: npt.NDArray[np.uint64] = np.zeros(num_blocks, dtype=np.uint64)
        size = 1 << (_HINTS_PER_BLOCK * num_blocks - 1).bit_length()
        self._by_low: npt.NDArray[np.int32] = np.zeros(size, dtype=np.int32)
        self._by_high: npt.NDArray[np.int32] = np.zeros(size, dtype=np.int32)
        self._mask = size - 1
        self.has: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        """Which blocks carry a digest; to be read only."""

    def __len__(self) -> int:
        """Blocks that carry a digest."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._blocks)

    def of(self, block: int) -> BlockHash | None:
        """The digest of a block."""
        return self._digests[block]

    def block(self, digest: BlockHash) -> int | None:
        """The block that carries a digest."""
        return self._blocks.get(digest)

    def give(self, block: int, digest: BlockHash) -> None:
        """From now on `block`, which has none, carries `digest`, which no block does."""
        low, high = _HALVES.unpack(digest)
        self._digests[block] = digest
        self._blocks[digest] = block
        self._low[block], self._high[block] = low, high
        self._by_low[low & self._mask] = block
        self._by_high[high & self._mask] = block
        self.has[block] = True

    def take(self, block: int) -> BlockHash | None:
        """Takes its digest from a block, and returns it; None: it had none."""
        digest = self._digests[block]
        if digest is not None:
            self._digests[block] = None
            self.has[block] = False
            del self._blocks[digest]
        return digest

    def clear(self) -> None:
        """No block carries one any more."""
        self._digests = [None] * len(self._digests)
        self._blocks.clear()
        self.has[:] = False

    def prefix(self, digests: Iterable[BlockHash]) -> npt.NDArray[np.intp]:
        """[found]: the blocks of `digests` up to the first that no block carries."""
        if isinstance(digests, Sequence) and len(digests) > _FEW:
            blocks, joined = self._hinted(digests)
            for at in np.flatnonzero(blocks == _UNKNOWN).tolist():
                block = self._blocks.get(joined[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES])
                if block is None:
                    return blocks[:at]
                blocks[at] = block
            return blocks
        # Asks for one after the other until it gets None.
        return np.array(list(iter(map(self._blocks.get, digests).__next__, None)), dtype=np.intp)

    def known(self, digests: Iterable[BlockHash]) -> npt.NDArray[np.intp]:
        """[found]: the blocks of those of `digests` that a block carries, in order."""
        if isinstance(digests, Sequence) and len(digests) > _FEW:
            blocks, joined = self._hinted(digests)
            unsure = np.flatnonzero(blocks == _UNKNOWN)
            if len(unsure):
                starts = (unsure * DIGEST_BYTES).tolist()
                blocks[unsure] = [self._blocks.get(joined[start : start + DIGEST_BYTES], _UNKNOWN) for start in starts]
                blocks = blocks[blocks != _UNKNOWN]
            return blocks
        return np.array([block for block in map(self._blocks.get, digests) if block is not None], dtype=np.intp)

    def _hinted(self, digests: Sequence[BlockHash]) -> tuple[npt.NDArray[np.intp], bytes]:
        """[digests]: the blocks that carry them, or -1 where both hints are wrong; and the digests, joined."""
        joined = as_joined(digests).joined
        halves = np.frombuffer(joined, dtype="<u8").reshape(-1, 2)
        low, high = halves[:, 0], halves[:, 1]
        blocks = self._believed(self._by_low, low, low, high)
        unsure = np.flatnonzero(blocks == _UNKNOWN)
        if len(unsure):
            low, high = low[unsure], high[unsure]
            blocks[unsure] = self._believed(self._by_high, high, low, high)
        return blocks, joined

    def _believed(self, hints: npt.NDArray[np.int32], places: _Words, low: _Words, high: _Words) -> npt.NDArray[np.intp]:
        """What `hints` say of these digests, or -1 where that is wrong."""
        blocks: npt.NDArray[np.intp] = hints.take((places & np.uint64(self._mask)).astype(np.intp)).astype(np.intp)
        right = (self._low.take(blocks) == low) & (self._high.take(blocks) == high) & self.has.take(blocks)
        return np.where(right, blocks, _UNKNOWN)

    def inconsistency(self) -> str | None:
        """What is wrong with these books, in words; None when they balance."""
        for block, digest in enumerate(self._digests):
            if bool(self.has[block]) != (digest is not None):
                return f"block {block} carries={bool(self.has[block])} a digest, which is {digest!r}"
            if digest is None:
                continue
            if self._blocks.get(digest) != block:
                return f"block {block} cannot be found by its digest"
            if (int(self._low[block]), int(self._high[block])) != _HALVES.unpack(digest):
                return f"block {block} has another digest in the arrays than {digest!r}"
        if len(self._blocks) != sum(digest is not None for digest in self._digests):
            return "a digest leads to a block that does not carry it"
        return None
