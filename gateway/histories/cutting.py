"""Where text may be cut: before special tokens, if the tokenizer allows it.

A tokenizer of the `tokenizers` library works in this order: it finds the added tokens in the text (leftmost, longest first),
and then normalises, pre-tokenises and encodes what lies between them, each piece by itself. So the ids of a text that is cut
where an added token begins are the ids of its parts, one after the other, provided that

- the token is found in the text as it is (not only in the normalised text), and takes no white space before it;
- no other added token can reach across the cut: neither begins before it and goes on in the token, nor has a condition on
  the word next to it that the cut would change;
- no stage draws lots (BPE dropout), and none is code of somebody else's.

All of this is read from the tokenizer when it is loaded, and tried on a few texts as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import orjson

from gateway.tokenization import TextTokenizer

_SAMPLES = ("", " ", "\n", "a", " a ", "\n\nü 日本", "{'k': [1, 2]}\n", "🙂")


class Cutter:
    """The special tokens of one tokenizer before which text may be cut. Immutable: safe to share between threads."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.refusal: str | None = _refusal(tokenizer)
        """Why this tokenizer's texts cannot be cut; None when they can."""
        added = tokenizer.backend.get_added_tokens_decoder()
        tokens = {} if self.refusal else {token.content: number for number, token in added.items()}
        self._safe = _safe_tokens(added.values()) if tokens else []
        if self._safe and not self._holds_on_samples():
            self.refusal = "cutting at special tokens changed the ids of a sample text"
            self._safe = []
        self._starts = _alternatives(self._safe)
        self._ends = [text for text in self._safe if tokens[text] in tokenizer.eos_token_ids]

    def may_cut(self, text: str, position: int) -> bool:
        """Whether `text` may be cut at `position`: at its ends, or where a safe special token begins."""
        return position in (0, len(text)) or self._starts.match(text, position) is not None

    def starts(self, text: str) -> bool:
        """Whether `text` begins with a special token, so that it may follow any other; an empty one may."""
        return not text or self._starts.match(text) is not None

    def last_end(self, text: str, start: int) -> int | None:
        """Where the end-of-turn token stands that `text` ends with, white space aside; None when it ends otherwise."""
        stripped = text.rstrip()
        for end in self._ends:
            at = len(stripped) - len(end)
            if at >= start and stripped.endswith(end):
                return at
        return None

    def end_of_turn(self, text: str, position: int) -> int | None:
        """Where a turn is over whose end-of-turn token stands at `position`: behind it and the white space after it, where the
        next special token begins or the text ends. None when no such token stands there."""
        for end in self._ends:
            if text.startswith(end, position):
                at = position + len(end)
                while at < len(text) and text[at].isspace():
                    at += 1
                return at if self.may_cut(text, at) else None
        return None

    def encode(self, text: str) -> bytes:
        """Packed ids of a text that begins at a cut. Raises ValueError for half surrogate pairs."""
        return self._tokenizer.encode_packed(text, add_special_tokens=False) if text else b""

    def _holds_on_samples(self) -> bool:
        encode = self._tokenizer.encode
        for token in self._safe[:8]:
            for before in _SAMPLES:
                for after in _SAMPLES:
                    head, tail = "a" + self._safe[0] + before, token + after
                    parts = encode(head, add_special_tokens=False) + encode(tail, add_special_tokens=False)
                    if parts != encode(head + tail, add_special_tokens=False):
                        return False
        return True


def _refusal(tokenizer: TextTokenizer) -> str | None:
    backend = tokenizer.backend
    if getattr(backend.model, "dropout", None):
        return "its BPE model uses dropout, so that equal texts have different ids"
    for name in ("normalizer", "pre_tokenizer"):
        stage = getattr(backend, name)
        if stage is None:
            continue
        try:
            description = orjson.loads(stage.__getstate__())
        except Exception:  # noqa: BLE001 - a stage written in Python raises whatever it likes
            return f"its {name} cannot be read"
        if "Custom" in _kinds(description):
            return f"its {name} is not one of the library's own"
    return None


def _kinds(description: object) -> set[str]:
    if isinstance(description, list):
        return set().union(*map(_kinds, description))
    if not isinstance(description, dict):
        return set()
    return {str(description.get("type"))}.union(*map(_kinds, description.values()))


def _safe_tokens(added: Iterable[object]) -> list[str]:
    tokens = list(added)
    contents = [token.content for token in tokens]  # type: ignore[attr-defined]
    # Every proper suffix of every added token: one that agrees with the beginning of a token could reach across its cut.
    suffixes = {content[at:] for content in contents for at in range(1, len(content))}
    by_first: dict[str, list[str]] = {}
    for suffix in suffixes:
        by_first.setdefault(suffix[0], []).append(suffix)
    safe = []
    for token in tokens:
        text: str = token.content  # type: ignore[attr-defined]
        # A word character before the cut would see another neighbour without what follows it.
        plain = bool(text) and not (text[0].isspace() or text[0].isalnum() or text[0] == "_")
        flags = token.special and not (token.lstrip or token.single_word or token.normalized)  # type: ignore[attr-defined]
        if plain and flags and not any(text.startswith(s) or s.startswith(text) for s in by_first.get(text[0], ())):
            safe.append(text)
    return sorted(safe, key=len, reverse=True)


def _alternatives(texts: list[str]) -> re.Pattern[str]:
    """Matches any of them, the longest first; nothing where there are none."""
    return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")
