"""Which ledger a turn goes on from, and how much of it they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sessions.digests import DIGEST_BYTES, meaning_digest
from sessions.ledger import Ledger, common_messages


class TurnText(msgspec.Struct, frozen=True):
    """What a turn is compared by. `digests`: of its messages, joined; `context`: of all else that shapes its prompt;
    `kwargs_name`: of its template variables. `volatile`: what its prompt depends on beside the request."""

    digests: bytes
    context: bytes
    kwargs_name: bytes
    volatile: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.digests) // DIGEST_BYTES


class Match(msgspec.Struct):
    """A ledger of a session and how many of its messages a turn shares. What a turn that continues it is like is found out when
    it is first asked for: `odd` (sessions.ledger.Ledger), `reasons`: its new messages hold reasoning, `by_tail`: it may be
    rendered without what it shares."""

    ledger: Ledger
    position: int
    messages: int
    odd: bool | None = None
    reasons: bool | None = None
    by_tail: bool | None = None

    def continues(self, text: TurnText) -> bool:
        """Whether the turn has all of the ledger's conversation, and all else that shapes its prompt is the same."""
        return self.messages == self.ledger.num_messages and self.ledger.context == text.context


def best_match(text: TurnText, branches: Sequence[Ledger], root: bytes, messages: Sequence[Mapping[str, Any]]) -> Match | None:
    """The branch that shares most with a turn; of equal ones the newest. None when none shares its first message."""
    best: Match | None = None
    for position, branch in enumerate(branches):
        if branch.root != root:
            continue
        ledger, shared = _same_meaning(branch, text.digests, messages)
        if shared and (best is None or shared > best.messages):
            best = Match(ledger, position, shared)
    return best


def _same_meaning(ledger: Ledger, digests: bytes, messages: Sequence[Mapping[str, Any]]) -> tuple[Ledger, int]:
    """How many messages a turn shares with a ledger, where an answer that was generated here counts by its meaning. The
    ledger then knows it by the digest that its client uses now."""
    while True:
        shared = common_messages(ledger.messages, digests)
        if shared == 0 or shared == ledger.num_messages or shared * DIGEST_BYTES >= len(digests):
            return ledger, shared
        position = ledger.spans_within(shared)
        if position >= ledger.num_spans:
            return ledger, shared
        span = ledger.span(position)
        alone = span.generated and span.messages == shared + 1
        if not alone or messages[shared]["role"] != "assistant" or meaning_digest(messages[shared]) != span.meaning:
            return ledger, shared
        at = shared * DIGEST_BYTES
        known = ledger.messages[:at] + digests[at : at + DIGEST_BYTES] + ledger.messages[at + DIGEST_BYTES :]
        ledger = msgspec.structs.replace(ledger, messages=known)
