"""Ids and spans that a turn adds to a ledger."""

from __future__ import annotations

from gateway.histories.cutting import Cutter
from prefix_cache.hashing import TOKEN_BYTES
from sessions.digests import NO_MEANING
from sessions.ledger import Span, text_digest


class Growth:
    """What follows a span of a ledger, in order. `messages`: how many are within spans; `tokenised`: ids made from text."""

    def __init__(self, end: Span, cutter: Cutter) -> None:
        self._cutter = cutter
        self._tokens = end.tokens
        self._text_bytes = end.text_bytes
        self.messages = end.messages
        self.ids: list[bytes] = []
        self.spans: list[Span] = []
        self.tokenised = 0

    def add_ids(self, ids: bytes, *, known: bool = False) -> None:
        self.ids.append(ids)
        self._tokens += len(ids) // TOKEN_BYTES
        if not known:
            self.tokenised += len(ids) // TOKEN_BYTES

    def add_text(self, text: str) -> None:
        self.add_ids(self._cutter.encode(text))

    def end_span(self, messages: int, text: str, meaning: bytes = NO_MEANING) -> None:
        encoded = text.encode("utf-8", "surrogatepass")
        self._text_bytes += len(encoded)
        self.messages = messages
        self.spans.append(Span(messages, self._tokens, self._text_bytes, text_digest(encoded), meaning))
