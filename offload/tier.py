"""What a tier is: a bounded store of blocks by digest that gives back only what it has verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from offload.checksum import Bytes
from prefix_cache.hashing import BlockHash


class Outgoing(NamedTuple):
    """A block to be stored: its encoded bytes, its position in its sequence, and who it belongs to (0: nobody in particular).

    `is_intact` is asked after the bytes were copied: False when they were overwritten meanwhile, and must not be kept.
    """

    digest: BlockHash
    payload: Bytes
    depth: int = 0
    session: int = 0
    is_intact: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What a tier holds and has done. `healed`: damaged blocks found and thrown away. `errors`: of the system. Totals are over
    all processes that share the tier, as far as they can see each other; `users`: those of this machine."""

    blocks: int
    used_bytes: int
    max_bytes: int
    stored: int = 0
    evicted: int = 0
    healed: int = 0
    reclaimed: int = 0
    errors: int = 0
    users: int = 1


class Tier(Protocol):
    """Called from transfer threads; every call may take as long as the medium takes, and may be made from several threads.

    Raises OSError or TierUnavailable when the medium fails; the caller then goes on without the tier (offload.guard).
    """

    name: str

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        """How many of `digests`, counted from the first, seem to be there. Cheap; loading has the last word."""

    def lacking(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Those of `digests` that seem not to be there, in order. Cheap."""

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        """Copies a block's encoded bytes into `into`, as long as they are. True only when they were verified afterwards; else
        `into` holds anything. Damage is counted, and the block thrown away."""

    def ahead(self, digests: Sequence[BlockHash]) -> None:
        """These will be loaded next, in this order."""

    def store(self, blocks: Sequence[Outgoing]) -> list[BlockHash]:
        """Stores blocks, making room for them; returns those that are there now. What was there already is not written."""

    def evict(self, digests: Iterable[BlockHash]) -> int:
        """Throws blocks away; returns how many were there."""

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        """What blocks are worth from now on (prefix_cache.worth). `expected` on the monotonic clock."""

    def figures(self) -> TierFigures:
        """What it holds and has done."""

    def check_integrity(self) -> None:
        """Raises TierCorrupt when its books do not balance."""

    def close(self) -> None:
        """Leaves it. Idempotent."""
