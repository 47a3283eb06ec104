"""Blocks that a session will not come back to: those of the history that it replaced."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_cache.hashing import DIGEST_BYTES
from sessions.ledger import Ledger, common_blocks, extend_blocks


def orphaned_blocks(old: Ledger, new: Ledger, others: Sequence[Ledger], shared_blocks: int) -> bytes:
    """Joined hashes of the blocks that `old` and its answers have and nobody else: neither `new`, which replaces it, nor the
    `others`, nor the first `shared_blocks`, which other sessions began with. Blocks of the first span stay as well: agents of
    one kind share their system prompt and tools, and nobody knows who else does."""
    said = [old.tokens.extended(old.num_tokens, (item.token_ids,)) for item in old.pending]
    answers = [extend_blocks(old.blocks, tokens, old.root, old.block_size) for tokens in said] or [old.blocks]
    keepers = [new.blocks, *(other.blocks for other in others)]
    first = -(-old.end_of(min(old.num_spans, 1)).tokens // old.block_size)
    own = len(old.blocks)
    orphaned = b""
    for blocks in answers:
        kept = max([first, shared_blocks, *(common_blocks(blocks, keeper) for keeper in keepers)]) * DIGEST_BYTES
        # The prompt's blocks once, then what each answer adds to them.
        orphaned += blocks[kept:] if not orphaned else blocks[max(kept, own) :]
    return orphaned
