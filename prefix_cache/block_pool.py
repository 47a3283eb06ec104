"""The block pool: the books of a fixed number of KV blocks. It knows no tensors, only ids, references and digests.

A block is in exactly one of three states:

    free         nobody refers to it and it holds nothing that could be found
    cached       nobody refers to it, but it can be found by its digest; the eviction policy orders these
    referenced   some sequence's table holds it (several, if they share it); it may be findable by its digest too

A block is published under its digest once it is full and its KV has been computed. A digest names at most one block: where
two sequences computed the same content at the same time, the later one is handed the earlier one's block and its own becomes
free. Freed blocks are considered for eviction tail first, so that what remains of a sequence is a prefix, which is all that
can ever be found again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from prefix_cache.block_names import BlockNames
from prefix_cache.events import AllCleared, BlocksRemoved, BlocksStored, KVEvent
from prefix_cache.eviction import BlockIds, EvictionPolicy, LRUPolicy
from prefix_cache.hashing import BlockHash, join_digests


class IntegrityError(Exception):
    """The books do not balance: a block was lost, used twice or given back twice. Always a bug, never bad input."""


class PoolExhausted(Exception):  # noqa: N818 - an ordinary answer; the scheduler preempts and goes on
    """More blocks were asked for than are free or cached."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Not thread-safe: it belongs to the engine thread.

    allocate, touch, free and publish are O(1) a block. A context of 100k tokens has thousands of blocks, and each of its turns
    looks them up, touches, frees and marks them: what is kept of blocks lies in arrays and dictionaries that do so in bulk.
    """

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy | None = None) -> None:
        """Raises ValueError for sizes below one."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token; got {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._policy: EvictionPolicy = LRUPolicy() if policy is None else policy
        # A stack, lowest id on top: blocks of a fresh pool come out in order, so that a sequence's KV lies in one run.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._names = BlockNames(num_blocks)
        self._events: list[KVEvent] = []
        self.generations = [0] * num_blocks
        """How often each block was handed out with nothing in it: as long as that stays, so does what a full block holds. Other
        threads may read it."""
        # Referenced blocks that go first once their last user has left them.
        self._superseded: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._places: npt.NDArray[np.intp] = np.zeros(num_blocks, dtype=np.intp)  # scratch

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks nobody refers to that can still be found."""
        return len(self._policy)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones, and cached ones by evicting them."""
        return len(self._free) + len(self._policy)

    @property
    def num_referenced(self) -> int:
        """Blocks in some sequence's table."""
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        """How many tables hold `block`."""
        return int(self._references[block])

    def digest(self, block: int) -> BlockHash | None:
        """The digest under which `block` can be found, None if it cannot."""
        return self._names.of(block)

    def lookup(self, digests: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `digests` that can be found. Changes nothing: `touch` them to keep them."""
        found: list[int] = self.find(digests).tolist()
        return found

    def find(self, digests: Iterable[BlockHash]) -> npt.NDArray[np.intp]:
        """As `lookup`, as an array [blocks], which costs less."""
        return self._names.prefix(digests)

    def block_of(self, digest: BlockHash) -> int | None:
        """The block that can be found by `digest`, None if there is none."""
        return self._names.block(digest)

    def unreferenced(self, blocks: BlockIds) -> int:
        """How many of `blocks` are cached, so that touching them would lower `num_available`."""
        return len(blocks) - int(np.count_nonzero(self._references[np.asarray(blocks, dtype=np.intp)]))

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each and nothing in them, all or none. Cached blocks are evicted when the free
        ones do not suffice. Raises PoolExhausted."""
        if count > self.num_available:
            raise PoolExhausted(f"{count} blocks asked for, {self.num_available} of {self.num_blocks} available")
        return self._take(count, self._policy.pop_all)

    def allocate_spare(self, count: int, expected: float) -> list[int]:
        """As `allocate`, but at most `count` blocks, and evicting only what is worth less than blocks of a session that is
        expected back at `expected`."""
        return self._take(count, lambda most: self._policy.pop_below(most, expected))

    def _take(self, count: int, evict: Callable[[int], list[int]]) -> list[int]:
        blocks = [self._free.pop() for _ in range(min(count, len(self._free)))]
        if len(blocks) < count:
            evicted = evict(count - len(blocks))
            if evicted:
                self._events.append(BlocksRemoved(join_digests(map(self._forget, evicted))))
            blocks += evicted
        self._references[blocks] = 1
        for block in blocks:
            self.generations[block] += 1
        return blocks

    def touch(self, blocks: BlockIds) -> None:
        """Adds a reference to each block. Raises IntegrityError for a free one, which may hold anything; then nothing has
        changed."""
        blocks = np.asarray(blocks, dtype=np.intp)
        last = self._last_of_each(blocks)
        cached = last[self._references[last] == 0]
        free = cached[~self._names.has[cached]]
        if len(free):
            raise IntegrityError(f"block {free[0]} is free and cannot be shared")
        self._policy.remove_all(cached)
        # Somebody asks for them again, so they are worth what others are worth.
        self._superseded[blocks] = False
        self._refer(blocks, last, 1)

    def free(self, table: BlockIds) -> None:
        """Drops one reference from each block of a sequence's table, given in the order of the sequence. What nobody refers
        to any more becomes cached, the tail to be evicted first, or free. Raises IntegrityError on one reference too many; then
        nothing has changed."""
        blocks = np.asarray(table, dtype=np.intp)[::-1]
        last = self._last_of_each(blocks)
        self._refer(blocks, last, -1)
        left = self._references[last]
        if (left < 0).any():
            self._refer(blocks, last, 1)
            raise IntegrityError(f"block {last[left < 0][0]} was given back more often than it was taken")
        unused = last[left == 0]
        published = self._names.has[unused]
        self._free += unused[~published].tolist()
        cached = unused[published]
        self._policy.add_all(cached)
        superseded = cached[self._superseded[cached]]
        if len(superseded):
            self._superseded[superseded] = False
            # The tail was left first and must go first, so it is named last.
            self._policy.supersede_all(superseded[::-1])

    def _last_of_each(self, blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Each of `blocks` once, where it is named last."""
        order = np.arange(len(blocks))
        self._places[blocks] = order
        is_last = self._places[blocks] == order
        return blocks if is_last.all() else blocks[is_last]

    def _refer(self, blocks: npt.NDArray[np.intp], distinct: npt.NDArray[np.intp], change: int) -> None:
        if len(distinct) == len(blocks):
            self._references[blocks] += change
        else:
            np.add.at(self._references, blocks, change)

    def supersede(self, digests: Iterable[BlockHash]) -> int:
        """Nobody will ask for these blocks again: they are given up before all others, the last of them first. `digests` in the
        order of their sequence; unknown ones are skipped. What is in use stays, and goes first once it is left; being touched
        makes a block like any other again. Returns how many blocks were found."""
        blocks = self._names.known(digests)
        used = self._references[blocks] > 0
        self._superseded[blocks[used]] = True
        self._policy.supersede_all(blocks[~used])
        return len(blocks)

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        """What blocks are worth while nobody uses them (prefix_cache.worth); `digests` in the order of their sequence,
        unknown ones are skipped. Returns how many were found."""
        blocks = self._names.known(digests)
        self._policy.mark_all(blocks[::-1], standing, expected, session)
        return len(blocks)

    def publish(self, blocks: Sequence[int], digests: Sequence[BlockHash], parent: BlockHash) -> list[int]:
        """Makes full, computed blocks of one sequence findable; they follow each other, `parent` is the digest before them.

        Returns the blocks the sequence holds from now on: where a digest is already known, the block known by it (with the
        reference moved over) in place of the sequence's own. Raises IntegrityError for a block that nobody refers to.
        """
        held = []
        stored: list[BlockHash] = []
        stored_parent = parent
        for block, digest in zip(blocks, digests, strict=True):
            if self._references[block] <= 0:
                raise IntegrityError(f"block {block} cannot be published: nobody refers to it")
            known = self._names.block(digest)
            if known is None:
                if self._names.of(block) is not None:
                    raise IntegrityError(f"block {block} is already published under another digest")
                self._names.give(block, digest)
                stored.append(digest)
                held.append(block)
            else:
                if known != block:
                    self.touch((known,))
                    self.free((block,))
                held.append(known)
                if stored:
                    self._events.append(BlocksStored(join_digests(stored), stored_parent))
                stored = []
                stored_parent = digest
        if stored:
            self._events.append(BlocksStored(join_digests(stored), stored_parent))
        return held

    def is_shared(self, block: int) -> bool:
        """True when `block` must not be written to: other tables hold it, or it is published."""
        return self._names.of(block) is not None or bool(self._references[block] > 1)

    def copy_on_write(self, block: int) -> int:
        """A private block in place of a shared one: moves the caller's reference there. The caller copies the contents
        before anything of this step is written. Raises PoolExhausted; then nothing has changed."""
        (private,) = self.allocate(1)
        self.free((block,))
        return private

    def clear(self) -> None:
        """Forgets every digest. Cached blocks become free; referenced ones stay with their sequences, unfindable."""
        self._free += self._policy.pop_all(len(self._policy))
        self._names.clear()
        self._policy.forget_all(np.arange(self.num_blocks))
        self._superseded[:] = False
        self._events.append(AllCleared())

    def take_events(self) -> list[KVEvent]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> bytes:
        """Joined digests of all blocks that can be found now."""
        return join_digests(self._names)

    def check_integrity(self, held: Mapping[int, int] | None = None) -> None:
        """Raises IntegrityError unless every block is free, cached or referenced, exactly once, and each digest names one
        block. `held`: block -> in how many tables its holders have it; when given, it must match the reference counts."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a block is in the free list twice")
        cached = list(self._policy)
        if len(set(cached)) != len(cached) or len(cached) != len(self._policy):
            raise IntegrityError("a block is in the eviction order twice")
        cached_set = set(cached)
        for block, references in enumerate(self._references.tolist()):
            states = (block in free) + (block in cached_set) + (references > 0)
            if states != 1 or references < 0:
                raise IntegrityError(
                    f"block {block} must be free, cached or referenced: free={block in free}, "
                    f"cached={block in cached_set}, references={references}"
                )
            digest = self._names.of(block)
            if block in free and digest is not None:
                raise IntegrityError(f"block {block} is free but still has a digest")
            if block in cached_set and digest is None:
                raise IntegrityError(f"block {block} is cached but has no digest")
            if held is not None and held.get(block, 0) != references:
                raise IntegrityError(f"block {block} has {references} references but is held {held.get(block, 0)} times")
        wrong = self._names.inconsistency()
        if wrong is not None:
            raise IntegrityError(wrong)
        idle = np.flatnonzero(self._superseded & ((self._references == 0) | ~self._names.has))
        if len(idle):
            raise IntegrityError(f"block {idle[0]} waits to be given up first, but nobody refers to it or it cannot be found")
        if free | cached_set and (max(free | cached_set) >= self.num_blocks or min(free | cached_set) < 0):
            raise IntegrityError("a block that does not exist is free or cached")

    def _forget(self, block: int) -> BlockHash:
        digest = self._names.take(block)
        if digest is None:
            raise IntegrityError(f"block {block} was evicted but has no digest")
        return digest
