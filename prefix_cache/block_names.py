"""Which block carries which digest, looked up for thousands of digests at once.

A dictionary knows for certain, but asking it for every block of a long context takes as many Python objects as there are
blocks. So beside it stand arrays: a hint of where a digest may be, at a place that its low bits say, and the digests
themselves. A hint is only believed when the block it names carries the digest that is looked for, all 128 bits of it; where two
digests share a place one of them is asked of the dictionary.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from prefix_cache.hashing import BlockHash, JoinedDigests, as_joined

_HALVES = struct.Struct("<QQ")
_HINTS_PER_BLOCK = 8
_FEW = 8

_UNKNOWN = -1


class BlockNames:
    """Blocks 0 to `num_blocks` - 1, each with one digest or none, and each digest with one block."""

    def __init__(self, num_blocks: int) -> None:
        self._digests: list[BlockHash | None] = [None] * num_blocks
        self._blocks: dict[BlockHash, int] = {}
        self._low: npt.NDArray[np.uint64] = np.zeros(num_blocks, dtype=np.uint64)
        self._high: npt.NDArray[np.uint64] = np.zeros(num_blocks, dtype=np.uint64)
        self._hints: npt.NDArray[np.int32] = np.zeros(1 << (_HINTS_PER_BLOCK * num_blocks - 1).bit_length(), dtype=np.int32)
        self._mask = len(self._hints) - 1
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
        self._hints[low & self._mask] = block
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
            blocks, words = self._hinted(digests)
            for at in np.flatnonzero(blocks == _UNKNOWN).tolist():
                block = self._blocks.get(words[at])
                if block is None:
                    return blocks[:at]
                blocks[at] = block
            return blocks
        # Asks for one after the other until it gets None.
        return np.array(list(iter(map(self._blocks.get, digests).__next__, None)), dtype=np.intp)

    def known(self, digests: Iterable[BlockHash]) -> npt.NDArray[np.intp]:
        """[found]: the blocks of those of `digests` that a block carries, in order."""
        if isinstance(digests, Sequence) and len(digests) > _FEW:
            blocks, words = self._hinted(digests)
            unsure = np.flatnonzero(blocks == _UNKNOWN)
            if len(unsure):
                blocks[unsure] = [self._blocks.get(words[at], _UNKNOWN) for at in unsure.tolist()]
                blocks = blocks[blocks != _UNKNOWN]
            return blocks
        return np.array([block for block in map(self._blocks.get, digests) if block is not None], dtype=np.intp)

    def _hinted(self, digests: Sequence[BlockHash]) -> tuple[npt.NDArray[np.intp], JoinedDigests]:
        """[digests]: the blocks that carry them, or -1 where the hint is wrong; and the digests."""
        joined = as_joined(digests)
        halves = np.frombuffer(joined.joined, dtype="<u8").reshape(-1, 2)
        low, high = halves[:, 0], halves[:, 1]
        blocks = self._hints.take((low & np.uint64(self._mask)).astype(np.intp)).astype(np.intp)
        right = (self._low.take(blocks) == low) & (self._high.take(blocks) == high) & self.has.take(blocks)
        blocks[~right] = _UNKNOWN
        return blocks, joined

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
