"""A session: its ledgers, one for each branch of the conversation, and what it used in all."""

from __future__ import annotations

import msgspec

from sessions.digests import prefix_name
from sessions.ledger import Ledger

_OVERHEAD = 1500
"""Bytes of a record's objects and its place in a store."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a session. `branches`: newest first. `version` goes up by one with every write.
    `epoch`: names the deletion after which the session began, "" for none known (sessions.store).

    `named`: False for a session that is known by its prefix alone. Times are Unix seconds. `shared_blocks`: as many blocks
    from the beginning also belong to sessions that were forked off. `called`: tools that the last turn called, whose end is
    `used_at`; None when it was not answered. `resumed`: a branch that another had replaced was gone
    on with: branches live side by side, and none is superseded. The totals count every turn: `cached_tokens` as workers
    reported them, `reused_tokens` and `spliced_tokens` as of Continuation. `prefill_seconds` and `decode_seconds`: what
    workers spent on it.
    """

    tenant: str
    key: str
    model: str
    version: int = 1
    epoch: str = ""
    named: bool = True
    source: str | None = None
    parent: str | None = None
    correlation: str | None = None
    created_at: float = 0.0
    used_at: float = 0.0
    branches: tuple[Ledger, ...] = ()
    called: tuple[str, ...] | None = None
    shared_blocks: int = 0
    resumed: bool = False
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    spliced_tokens: int = 0
    tokenised_tokens: int = 0
    misses: int = 0
    superseded_blocks: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return _OVERHEAD + sum(ledger.nbytes for ledger in self.branches)

    def prefix_names(self) -> list[bytes]:
        """The names under which requests without a session find it: one for each branch, of all its messages."""
        return [prefix_name(ledger.messages, ledger.context) for ledger in self.branches if ledger.messages]
