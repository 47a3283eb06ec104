"""Blocks for sequences: the steps between a sequence's tokens and the pool's books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.request import Sequence
from offload.transfers import Filled
from prefix_cache.block_pool import BlockPool

BlockCopy = tuple[int, int]
"""(source, destination): a block to be copied over all layers before a step writes."""


class KVCache:
    """Gives blocks to sequences and takes them back. With `caching`, full blocks are published and found again."""

    def __init__(self, pool: BlockPool, *, caching: bool, keep_filled: bool = False) -> None:
        """keep_filled: `take_filled` says which blocks have become full."""
        self.pool = pool
        self.caching = caching
        self._keep_filled = keep_filled
        self._filled: list[Filled] = []

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.pool.block_size)

    def match(self, sequence: Sequence) -> npt.NDArray[np.intp]:
        """Published blocks of the longest known prefix. The last token is never among them: it must be computed, since its
        hidden state chooses the next one."""
        if not self.caching:
            return np.zeros(0, dtype=np.intp)
        count = (sequence.num_tokens - 1) // self.pool.block_size
        sequence.name_blocks(count, self.pool.block_size)
        return self.pool.find(sequence.digests[:count])

    def attach(self, sequence: Sequence, found: npt.NDArray[np.intp]) -> None:
        """Starts a sequence that holds nothing from the blocks that `match` found."""
        self.pool.touch(found)
        sequence.table.extend(found)
        sequence.computed = len(found) * self.pool.block_size
        sequence.published = len(found)

    def count_to_match(self, sequence: Sequence) -> int:
        """How many blocks of a sequence could be found, at most; they have names."""
        return min(len(sequence.digests), (sequence.num_tokens - 1) // self.pool.block_size) if self.caching else 0

    def begin_load(self, sequence: Sequence, count: int) -> None:
        """Takes `count` blocks for what is loaded behind those that were attached."""
        sequence.table.extend(self.pool.allocate(count))

    def end_load(self, sequence: Sequence, count: int) -> None:
        """The first `count` of the blocks taken hold what they should, and can be found from now on; the others go back."""
        start = sequence.published
        self.pool.free(sequence.table.cut(start + count))
        if count:
            parent = sequence.digests[start - 1] if start else sequence.request.root
            digests = sequence.digests[start : start + count]
            sequence.table.replace(start, self.pool.publish(sequence.table.part(start), digests, parent))
        sequence.published = start + count
        sequence.computed = sequence.published * self.pool.block_size

    def take_filled(self) -> list[Filled]:
        """Blocks that were computed and published since the last call."""
        filled, self._filled = self._filled, []
        return filled

    def shortfall(self, sequence: Sequence, tokens: int) -> int:
        """Blocks to allocate before the next `tokens` tokens of a sequence can be written."""
        return self._shortfall(sequence, tokens, self._must_copy(sequence))

    def _shortfall(self, sequence: Sequence, tokens: int, must_copy: bool) -> int:
        return self.blocks_for(sequence.computed + tokens) - len(sequence.table) + must_copy

    def reserve(self, sequence: Sequence, tokens: int) -> list[BlockCopy] | None:
        """Makes room for the next `tokens` tokens; None, with nothing changed, when the pool cannot. What is returned must
        be copied before the step writes."""
        must_copy = self._must_copy(sequence)
        shortfall = self._shortfall(sequence, tokens, must_copy)
        if shortfall > self.pool.num_available:
            return None
        copies = []
        if must_copy:
            index = sequence.computed // self.pool.block_size
            shared = sequence.table[index]
            private = self.pool.copy_on_write(shared)
            sequence.table.replace(index, (private,))
            copies.append((shared, private))
            shortfall -= 1
        if shortfall > 0:
            sequence.table.extend(self.pool.allocate(shortfall))
        return copies

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """The next `tokens` tokens have been computed: what is full now can be found from now on."""
        sequence.computed += tokens
        full = sequence.computed // self.pool.block_size
        if not self.caching or full <= sequence.published:
            return
        sequence.name_blocks(full, self.pool.block_size)
        start = sequence.published
        parent = sequence.digests[start - 1] if start else sequence.request.root
        own = sequence.table.part(start, full)
        held = self.pool.publish(own, sequence.digests[start:full], parent)
        if self._keep_filled:
            generations, session = self.pool.generations, sequence.request.session
            for index, (block, kept) in enumerate(zip(own, held, strict=True), start):
                if block == kept:
                    self._filled.append(Filled(sequence.digests[index], block, generations[block], index, session))
        sequence.table.replace(start, held)
        sequence.published = full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child`, which holds nothing, all that `parent` holds, the partial last block too."""
        self.pool.touch(parent.table.array)
        child.table.extend(parent.table.array)
        child.computed = parent.computed
        child.published = parent.published
        child.digests = parent.digests.copy()

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks back. What was published may be found again as long as nobody needs the room."""
        self.pool.free(sequence.table.take())
        sequence.computed = 0
        sequence.published = 0

    def check_integrity(self, running: Iterable[Sequence], others: Iterable[int] = ()) -> None:
        """Raises IntegrityError unless the pool's references are exactly those of these sequences, and one each of `others`."""
        held = Counter(block for sequence in running for block in sequence.table.part(0))
        held.update(others)
        self.pool.check_integrity(held)

    def _must_copy(self, sequence: Sequence) -> bool:
        index, offset = divmod(sequence.computed, self.pool.block_size)
        return offset > 0 and index < len(sequence.table) and self.pool.is_shared(sequence.table[index])
