"""Ledgers and records with made-up contents."""

from __future__ import annotations

import os

from prefix_cache.hashing import pack_tokens
from prefix_cache.packed_tokens import PackedTokens
from sessions.digests import NO_MEANING, message_digests
from sessions.ledger import Ledger, Span, extend_blocks, pack_spans, text_digest
from sessions.records import SessionRecord

ROOT = b"r" * 16


def a_ledger(texts: list[str], *, generated: tuple[int, ...] = (), block_size: int = 4, tokens_each: int = 3) -> Ledger:
    """One message and one span for each text, `tokens_each` ids for each; `generated`: positions of generated ones."""
    ids = PackedTokens(pack_tokens(range(len(texts) * tokens_each)))
    spans = []
    end = 0
    for position, text in enumerate(texts):
        end += len(text)
        meaning = bytes([position + 1]) * 16 if position in generated else NO_MEANING
        spans.append(Span(position + 1, (position + 1) * tokens_each, end, text_digest(text.encode()), meaning))
    return Ledger(
        context=b"c" * 16,
        root=ROOT,
        block_size=block_size,
        messages=message_digests([{"role": "user", "content": text} for text in texts]),
        spans=pack_spans(spans),
        tokens=ids,
        blocks=extend_blocks(b"", ids, ROOT, block_size),
        generated_tokens=len(generated) * tokens_each,
    )


def a_record(key: str, *ledgers: Ledger, tenant: str = "t", version: int = 1, epoch: str = "") -> SessionRecord:
    return SessionRecord(tenant=tenant, key=key, model="m", branches=ledgers, version=version, epoch=epoch)


def a_large_ledger(num_tokens: int, num_messages: int) -> Ledger:
    """Random ids, as long as asked for."""
    ids = PackedTokens(os.urandom(num_tokens * 4))
    each = num_tokens // num_messages
    spans = [Span(at + 1, (at + 1) * each, (at + 1) * each * 4, at) for at in range(num_messages)]
    return Ledger(
        context=b"c" * 16,
        root=ROOT,
        block_size=16,
        messages=os.urandom(16 * num_messages),
        spans=pack_spans(spans),
        tokens=ids,
        blocks=extend_blocks(b"", ids, ROOT, 16),
        tail="<|im_start|>assistant\n",
    )
