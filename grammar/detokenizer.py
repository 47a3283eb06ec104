"""Token ids to text as they come. Whatever the pieces, their texts joined equal decoding all ids at once.

Two ways, chosen by the tokenizer's decoder:

- *Byte level* (GPT-2, Llama 3, Qwen, SmolLM2): every token is a run of bytes, so an incremental UTF-8 decoder is exact. It
  holds back at most three bytes, and replaces ill-formed ones by U+FFFD at the same places as the whole decode, both
  following "maximal subpart" replacement (Unicode 16, section 3.9).
- *Any other* (SentencePiece with byte fallback, WordPiece, ...): new tokens are decoded behind a few that were decoded
  before, and what the decode adds is the new text (the prefix and read offsets of TGI and vLLM). Skipped tokens never enter
  that window, because a prefix that decodes to nothing would make the next token look like the first. A run of byte tokens
  is held back until another token ends it: one ill-formed byte turns its whole run into U+FFFD, so no earlier moment is
  certain.

A token costs amortised constant time in both. ByteLevel followed by a decoder that changes its text (no published model has
that) goes the second way; there the join is exact for well-formed UTF-8 only.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"

_WINDOW = 16
"""Tokens that the window may grow to before it is cut back."""

_KEEP = 4
"""Tokens it is cut back to; a decoder that strips n characters at the start of the text needs n."""

_MAX_OTHERS = 8
"""Sets of special tokens shown that are remembered; a model's format needs one."""

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 sequence, so tokens that an unfinished character can span."""


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE writes bytes as (GPT-2): 188 stand for themselves, 68 from U+0100 on."""
    direct = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(direct)]
    return {chr(byte): byte for byte in direct} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _components(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The decoders that a decoder consists of, in order."""
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for part in decoder.get("decoders", ()):
        yield from _components(part)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a tokenizer's decoder is like: read once, shared by every Detokenizer that comes from the same one."""

    byte_level: bool  # its decoder is ByteLevel and nothing that changes the text
    byte_fallback: bool
    unfinished_characters: bool  # ByteLevel among others: a trailing U+FFFD may yet become a character
    keep: int
    skipped: frozenset[int]
    bytes_of: dict[int, bytes] = field(default_factory=dict)  # of byte-level tokens seen; as many as the vocabulary has
    others: dict[frozenset[int], _Rules] = field(default_factory=dict)  # with other tokens skipped

    @classmethod
    def of(cls, tokenizer: Tokenizer, skip_special_tokens: bool) -> _Rules:
        decoder = tokenizer.decoder
        parts = [] if decoder is None else list(_components(msgspec.json.decode(decoder.__getstate__())))
        kinds = [part.get("type") for part in parts]
        added = tokenizer.get_added_tokens_decoder().items() if skip_special_tokens else ()
        return cls(
            byte_level=kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]),
            byte_fallback="ByteFallback" in kinds,
            unfinished_characters="ByteLevel" in kinds,
            keep=max([_KEEP, *(int(part.get("start", 0)) for part in parts if part.get("type") == "Strip")]),
            skipped=frozenset(token_id for token_id, token in added if token.special),
        )

    def showing(self, shown: frozenset[int]) -> _Rules:
        """With text for these tokens."""
        shown = shown & self.skipped
        if not shown:
            return self
        if shown not in self.others:
            if len(self.others) >= _MAX_OTHERS:
                self.others.clear()
            self.others[shown] = replace(self, skipped=self.skipped - shown, bytes_of={}, others={})
        return self.others[shown]


class Detokenizer:
    """Decodes one stream of token ids. Ids that the tokenizer does not know have no text, as in its own decode.

    skip_special_tokens: tokens added as special have no text. Making one reads the tokenizer's added tokens; `fresh` and
    `copy` share what was read and cost nothing.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._rules = _Rules.of(tokenizer, skip_special_tokens)
        self._clear()

    def _clear(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []  # tokens whose text was given out
        self._sent = 0  # characters of the window's text
        self._pending: list[int] = []  # tokens after it

    def feed(self, token_ids: Sequence[int]) -> str:
        """More tokens. Returns the text that is certain by now; a character that is not whole is held back."""
        if self._rules.byte_level:
            return self._utf8.decode(b"".join(map(self._bytes, token_ids)))
        closed = 0
        for token_id in token_ids:
            token = self._token(token_id)
            if token is None:
                continue
            self._pending.append(token_id)
            if not (self._rules.byte_fallback and _is_byte(token)):
                closed = len(self._pending)
        return self._decode(closed) if closed else ""

    def finish(self) -> str:
        """The end of the tokens: returns the text held back; bytes that make no character become U+FFFD."""
        if self._rules.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._decode(len(self._pending), final=True) if self._pending else ""

    def fresh(self) -> Detokenizer:
        """One for another stream of the same tokenizer, with nothing fed."""
        other = object.__new__(type(self))
        other._tokenizer, other._rules = self._tokenizer, self._rules
        other._clear()
        return other

    def showing(self, texts: Sequence[str]) -> Detokenizer:
        """As `fresh`, with text for these special tokens. Texts that are no tokens count for nothing."""
        other = self.fresh()
        if texts:
            other._rules = self._rules.showing(frozenset(filter(None, map(self._tokenizer.token_to_id, texts))))
        return other

    def copy(self) -> Detokenizer:
        """One that goes on from here by itself."""
        other = self.fresh()
        other._utf8.setstate(self._utf8.getstate())
        other._window, other._sent, other._pending = list(self._window), self._sent, list(self._pending)
        return other

    def _token(self, token_id: int) -> str | None:
        """The vocabulary's text of a token; None where it has none or is skipped."""
        if token_id in self._rules.skipped:
            return None
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def _bytes(self, token_id: int) -> bytes:
        """The bytes of a byte-level token. Added tokens with other characters stand for themselves, as in its decoder."""
        known = self._rules.bytes_of.get(token_id)
        if known is not None:
            return known
        token = self._token(token_id)
        if token is None:
            return b""
        try:
            known = bytes([_BYTE_OF[character] for character in token])
        except KeyError:
            known = token.encode()
        self._rules.bytes_of[token_id] = known
        return known

    def _decode(self, count: int, final: bool = False) -> str:
        """Gives out the text of the first `count` pending tokens, unless its last character may still be unfinished."""
        tokens = self._window + self._pending[:count]
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        if self._rules.unfinished_characters and not final and text.endswith(REPLACEMENT) and count < _LONGEST_CHARACTER:
            return ""
        new = text[self._sent :]
        self._pending = self._pending[count:]
        self._window, self._sent = tokens, len(text)
        if len(tokens) > _WINDOW:
            self._window = tokens[-self._rules.keep :]
            self._sent = len(self._tokenizer.decode(self._window, skip_special_tokens=False))
        return new


def _is_byte(token: str) -> bool:
    """Whether byte fallback reads a token as a byte: <0x0A>."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
