"""Blocks of workers that hash in their own way (vLLM, SGLang), under our names.

Such a worker's events carry the tokens of a block and the worker's name of the block before it. So each block gets our digest,
chained from our digest of its parent; what has a parent that was never heard of cannot be named, is counted and left out: the
index then knows less of the worker than it holds, never more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from prefix_cache.events import DEVICE, DISK, HOST, AllCleared, BlocksRemoved, BlocksStored, KVEvent
from prefix_cache.hashing import BlockHash, iter_block_digests, pack_tokens
from prefix_cache.vllm_wire import ForeignCleared, ForeignEvent, ForeignHash, ForeignRemoved, ForeignStored

Roots = Callable[[str | None, str | None], BlockHash | None]
"""(adapter, salt) -> the parent of a first block; None for an adapter that is not known."""

_TIERS = {"GPU": DEVICE, "CPU": HOST, "CPU_PINNED": HOST, "STORAGE": DISK, "DISK": DISK}


class _Block:
    __slots__ = ("digests", "tiers")

    def __init__(self, digests: bytes) -> None:
        self.digests = digests
        self.tiers: set[str] = set()


class ForeignBlocks:
    """What one life of such a worker holds. Pure; events are to be applied in order.

    `block_size`: of our digests, in tokens; the worker's is a multiple of it. At most `max_blocks` of the worker's blocks are
    remembered, the ones stored longest ago are dropped first.
    """

    def __init__(self, roots: Roots, block_size: int, max_blocks: int = 1_000_000) -> None:
        self._roots = roots
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[ForeignHash, _Block] = OrderedDict()
        self.unknown_parents = 0
        """Stored events left out, as the block before theirs is not known."""
        self.not_named = 0
        """Stored events left out, as their blocks are not named by their tokens or make no sense: wrong lengths, images."""

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: ForeignEvent) -> list[KVEvent]:
        """What an event changes, in our names."""
        match event:
            case ForeignStored():
                return self._store(event)
            case ForeignRemoved():
                return self._remove(event)
            case ForeignCleared():
                self._blocks.clear()
                return [AllCleared()]

    def clear(self) -> None:
        """Forgets everything: events were lost."""
        self._blocks.clear()

    def _store(self, event: ForeignStored) -> list[KVEvent]:
        if event.group:
            return []
        size = event.block_size
        if not event.plain or size % self._block_size or len(event.token_ids) != size * len(event.hashes) or not event.hashes:
            self.not_named += 1
            return []
        parent = self._parent(event)
        if parent is None:
            self.unknown_parents += 1
            return []
        tier = _TIERS.get(event.medium or "GPU", HOST)
        digests = list(iter_block_digests(pack_tokens(event.token_ids), parent, self._block_size))
        each = size // self._block_size
        changed: list[KVEvent] = []
        for position, name in enumerate(event.hashes):
            joined = b"".join(digests[position * each : (position + 1) * each])
            block = self._blocks.get(name)
            if block is not None and block.digests != joined:
                # One name for two contents: its own hash collides, or a life ended unheard. The newer one counts.
                changed += [BlocksRemoved(block.digests, each_tier) for each_tier in sorted(block.tiers)]
                block = None
            if block is None:
                block = self._blocks[name] = _Block(joined)
            block.tiers.add(tier)
            self._blocks.move_to_end(name)
        changed.append(BlocksStored(b"".join(digests), parent, tier))
        while len(self._blocks) > self._max_blocks:
            _, old = self._blocks.popitem(last=False)
            changed += [BlocksRemoved(old.digests, each_tier) for each_tier in sorted(old.tiers)]
        return changed

    def _parent(self, event: ForeignStored) -> BlockHash | None:
        if event.parent is None:
            return self._roots(event.lora_name, event.salt)
        before = self._blocks.get(event.parent)
        return before.digests[-16:] if before is not None else None

    def _remove(self, event: ForeignRemoved) -> list[KVEvent]:
        if event.group:
            return []
        tier = _TIERS.get(event.medium or "GPU", HOST)
        gone = []
        for name in event.hashes:
            block = self._blocks.get(name)
            if block is None or tier not in block.tiers:
                continue
            gone.append(block.digests)
            block.tiers.discard(tier)
            if not block.tiers:
                del self._blocks[name]
        return [BlocksRemoved(b"".join(gone), tier)] if gone else []
