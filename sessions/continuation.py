"""What a turn takes over from the ledger of its predecessor, and where the two part."""

from __future__ import annotations

from typing import Literal

import msgspec

from sessions.ledger import Ledger

Path = Literal["new", "tail", "whole", "text"]
"""How a prompt was made. `new`: no ledger. `tail`: only the new messages were rendered. `whole`: all of it was rendered, and
compared with the ledger span by span. `text`: rendered and tokenised as a whole, as nothing can be spliced."""


class Divergence(msgspec.Struct, frozen=True):
    """Where a turn stops being its predecessor's continuation.

    `cause`: `message` (it is not what it was), `shorter` (the conversation ends before it), `template` (the message is the
    same and its text is not, as when old reasoning is stripped), `generated` (an answer came back with another meaning),
    `context` (model, tools or template variables are others). `message`: index of the first message concerned. `tokens` and
    `text_bytes`: where the shared prefix ends, in token ids and in UTF-8 bytes of the template's text. `lost_tokens`: tokens of
    the predecessor, its answer among them, from there on.
    """

    cause: Literal["message", "shorter", "template", "generated", "context"]
    message: int
    tokens: int
    text_bytes: int
    lost_tokens: int


class Continuation(msgspec.Struct, frozen=True):
    """The prompt of a turn, made from a ledger and what is new.

    `ledger`: of this turn; `ledger.tokens` is the prompt, `ledger.pending` is empty until it was answered. `predecessor`:
    the ledger it continues, None for a conversation that is new. `matched_messages`: messages taken over.
    `reused_tokens`: ids taken over, of which `spliced_tokens` were generated and came back with this turn;
    `tokenised_tokens`: ids that were made from text. `divergence`: None when all of the predecessor is taken over, its answer
    included. `orphaned`: joined hashes of blocks that the predecessor had and this turn has not, where the turn replaces it.
    `fallbacks`: why something was not spliced or not cut, in fixed words (docs/sessions.md). `new_text`: the template's text
    from the end of the shared prefix on, for explanations; "" when there is no divergence.
    """

    ledger: Ledger
    path: Path
    predecessor: Ledger | None = None
    matched_messages: int = 0
    reused_tokens: int = 0
    spliced_tokens: int = 0
    tokenised_tokens: int = 0
    divergence: Divergence | None = None
    orphaned: bytes = b""
    fallbacks: tuple[str, ...] = ()
    new_text: str = ""
