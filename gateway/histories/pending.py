"""Answers that have not come back yet, as a ledger keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gateway.histories.splicing import reasoning_of
from prefix_cache.hashing import pack_tokens
from sessions.digests import meaning_digest
from sessions.ledger import Generated, Ledger

_MAX_PENDING = 8


class Said(NamedTuple):
    """An answer: the message as it was returned, the ids without the end token, and whether it was ended in the middle."""

    message: Mapping[str, Any]
    ids: Sequence[int]
    cut: bool = False


def pending_from(ledger: Ledger, answers: Sequence[Said]) -> tuple[Generated, ...]:
    """A ledger's pending answers with new ones before them."""
    fresh = []
    for answer in answers[:_MAX_PENDING]:
        reasoning = reasoning_of(answer.message) is not None
        fresh.append(Generated(meaning_digest(answer.message), pack_tokens(answer.ids), reasoning, answer.cut))
    kept = [item for item in ledger.pending if all(item.token_ids != other.token_ids for other in fresh)]
    return tuple([*fresh, *kept][:_MAX_PENDING])
