"""The ids of words, remembered: for plain ASCII text a tenth of what the tokenizer takes.

A byte-level BPE tokenizer cuts text into words by a regular expression and encodes each word by itself. Agents send the same
words again and again, so the ids of a text are looked up word by word, and the tokenizer is asked for the words that are new.
The expressions in use are written for Oniguruma, with Unicode properties; on ASCII text they mean what the same expressions
with `A-Za-z` and `0-9` mean to `re`. Only expressions made of constructs that both read alike are taken (`_words_source`), only
for tokenizers whose other stages do nothing to ASCII text, and both are compared on samples when a tokenizer is loaded. Any
other text and any other tokenizer goes to the library. Where the expression allows it, several words are looked up at once
(chunk_memo.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

from gateway.chunk_memo import ChunkMemo, cuts_at_spaces

_MAX_WORDS = 65_536
_MAX_WORD = 64
_MAX_TEXT = 2**20
_SHORT = 48
_MAX_SHORT = 4096
_FEW = 8
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Between two digits the text is cut before the expression sees it, so that its end may be a digit as well.
_GPT2_BETWEEN_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_ALLOWED = re.compile(
    r"(?:\\p\{[LN]\}|\\[sSrn]|\[\^?(?:\\p\{[LN]\}|\\[sSrn]|[ '])+\]|\(\?i:[a-z'|]+\)"
    r"|\(\?!(?:\\S|\[\^\\s\\p\{N\}\])\)|\{1,3\}|[ '|?+*a-z])+"
)
_SAMPLES = (
    "".join(map(chr, range(128))),
    "I'll don't WE'VE it'S 's 'x  two   three\n\n four\t\tfive \r\n six  7 89  12ab ab12 a1b22 _x_ __init__(self)->None: ",
    ' {"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2.50, -3]}}\n   indented\n\n\n\tcode  #! /bin/env ',
    " \n \n  x  \n\n 1 \r\r\n  2\x0b\x0c3 \x1c\x1d a\x7f~~~ ...!!! (((a))) 'tis ''d  ",
)


class WordMemo:
    """Ids of ASCII text without added tokens in it. Safe to use from several threads: entries are only ever added."""

    def __init__(
        self,
        backend: Tokenizer,
        words: re.Pattern[str],
        added: re.Pattern[str],
        ids: Mapping[str, bytes],
        *,
        cut_at_spaces: bool = False,
    ) -> None:
        """`cut_at_spaces`: as gateway.chunk_memo says of the expression behind `words`."""
        self._backend = backend
        self._words = words
        self._added = added
        self._added_ids = ids
        self._known: dict[str, bytes] = {}
        # Ends of turns and generation prompts, the same every turn.
        self._short: dict[str, bytes] = {}
        self._encode_piece = ChunkMemo(self._by_words).encode if cut_at_spaces else self._by_words

    @classmethod
    def of(cls, backend: Tokenizer) -> WordMemo | None:
        """The memo of a tokenizer, None where it could not be trusted."""
        source = _words_source(backend)
        tokens = list(backend.get_added_tokens_decoder().items())
        plain = all(not (t.lstrip or t.rstrip or t.single_word or t.normalized) and t.content for _, t in tokens)
        if source is None or not plain:
            return None
        pattern = re.compile(re.sub(r"(\[[^\]]*\])|\\p\{L\}|\\p\{N\}", _in_ascii, source), re.ASCII)
        texts = sorted((token.content for _, token in tokens), key=len, reverse=True)
        added = re.compile("(" + "|".join(map(re.escape, texts)) + ")" if texts else r"((?!))")
        ids = {token.content: _packed([number]) for number, token in tokens}
        memo = cls(backend, pattern, added, ids, cut_at_spaces=cuts_at_spaces(source))
        return memo if all(memo._agrees(sample) for sample in _SAMPLES) else None

    def encode(self, text: str) -> bytes | None:
        """Packed ids of `text`, without the special tokens that go around a prompt. None: ask the tokenizer."""
        short = len(text) <= _SHORT
        if short and (known := self._short.get(text)) is not None:
            return known
        if len(text) > _MAX_TEXT or not text.isascii():
            return None
        parts: list[bytes] = []
        for at, piece in enumerate(self._added.split(text)):
            if at % 2:
                parts.append(self._added_ids[piece])
            elif piece:
                parts.append(self._encode_piece(piece))
        ids = b"".join(parts)
        if short:
            if len(self._short) >= _MAX_SHORT:
                self._short.clear()
            self._short[text] = ids
        return ids

    def _by_words(self, piece: str) -> bytes:
        words = self._words.findall(piece)
        try:
            return b"".join(map(self._known.__getitem__, words))
        except KeyError:
            found = list(map(self._known.get, words))
        if found.count(None) > _FEW:
            return self._learn(piece, words)
        return b"".join([self._ask(word) if ids is None else ids for word, ids in zip(words, found, strict=True)])

    def _ask(self, word: str) -> bytes:
        ids = _packed(self._backend.encode_batch_fast([word], add_special_tokens=False)[0].ids)
        self._add(word, ids)
        return ids

    def _learn(self, piece: str, words: Sequence[str]) -> bytes:
        """The ids of a piece from the tokenizer, which tells which word each belongs to."""
        encoding = self._backend.encode(piece, add_special_tokens=False)
        packed = _packed(encoding.ids)
        owners = np.asarray(encoding.word_ids, dtype=np.int64)
        if len(owners) and owners[-1] == len(words) - 1:
            starts = np.searchsorted(owners, np.arange(len(words) + 1)).tolist()
            for at, word in enumerate(words):
                self._add(word, packed[4 * starts[at] : 4 * starts[at + 1]])
        return packed

    def _add(self, word: str, ids: bytes) -> None:
        if len(word) <= _MAX_WORD and ids:
            if len(self._known) >= _MAX_WORDS:
                self._known.clear()
            self._known[word] = ids

    def _agrees(self, sample: str) -> bool:
        expected = _packed(self._backend.encode(sample, add_special_tokens=False).ids)
        words = self._words.findall(sample)
        by_word = b"".join(map(self._ask, words))
        return "".join(words) == sample and by_word == expected == self.encode(sample) == self._by_words(sample)


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def _words_source(backend: Tokenizer) -> str | None:
    """The expression for words, which `re` reads alike for ASCII text; None for stages that are not known."""
    if getattr(backend.model, "dropout", None):
        return None
    normalizer = _description(backend.normalizer)
    if normalizer not in (None, {"type": "NFC"}):
        return None
    stages = _description(backend.pre_tokenizer)
    if not isinstance(stages, dict):
        return None
    flat = stages["pretokenizers"] if stages.get("type") == "Sequence" else [stages]
    if not flat or flat[-1].get("type") != "ByteLevel" or flat[-1].get("add_prefix_space"):
        return None
    *before, last = flat
    source = _source(before, bool(last.get("use_regex", True)))
    return source if source is not None and _ALLOWED.fullmatch(source) else None


def _source(before: Sequence[Mapping[str, Any]], by_regex: bool) -> str | None:
    if by_regex:
        if not before:
            return _GPT2
        digits = len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits")
        return _GPT2_BETWEEN_DIGITS if digits else None
    if len(before) != 1 or before[0].get("type") != "Split":
        return None
    split = before[0]
    pattern = split.get("pattern")
    if split.get("behavior") != "Isolated" or split.get("invert") or not isinstance(pattern, dict):
        return None
    source = pattern.get("Regex")
    return source if isinstance(source, str) else None


def _in_ascii(match: re.Match[str]) -> str:
    if match[1]:
        return match[1].replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9")
    return "[A-Za-z]" if match[0] == r"\p{L}" else "[0-9]"


def _description(stage: Any) -> Any:
    if stage is None:
        return None
    try:
        return orjson.loads(stage.__getstate__())
    except Exception:  # noqa: BLE001 - a stage written in Python raises whatever it likes
        return "unknown"
