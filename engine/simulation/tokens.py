"""Which tokens a simulated replica generates: a function of what stands before, the same on every replica and at every time.

A token depends on the digest of the last full block before it, the tokens since, the seed and the choice. So a generation
that is continued elsewhere, from its prompt and what was generated so far, goes on as it would have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import xxhash
from tokenizers import Tokenizer

_WORD = re.compile(r" [a-z]{3,}")
_LETTER = re.compile(r"[a-z]")


class TokenSource:
    """Draws from `token_ids`; with `mean_output_tokens` > 0 an end token comes after that many in the mean."""

    def __init__(self, token_ids: tuple[int, ...], eos_token_ids: tuple[int, ...], mean_output_tokens: int) -> None:
        self._token_ids = token_ids
        self._eos = eos_token_ids[:1] if mean_output_tokens else ()
        self._mean = mean_output_tokens

    def next(self, key: bytes, digest: bytes, tail: bytes, may_end: bool) -> int:
        """The token after a sequence. `digest`: of its last full block; `tail`: its packed tokens since; `key`: what else
        tells generations apart (seed and choice)."""
        drawn = xxhash.xxh3_64_intdigest(key + digest + tail)
        if may_end and self._eos and (drawn >> 40) % self._mean == 0:
            return self._eos[0]
        return self._token_ids[(drawn & 0xFFFFFFFF) % len(self._token_ids)]


def harmless_tokens(tokenizer: Tokenizer, count: int = 512) -> tuple[int, ...]:
    """Up to `count` ids of plain lower-case words with a leading space, or else of single letters; may be empty.

    Words with a space in front come back as the same ids when a client returns the text and it is tokenised again: such
    tokenizers split at spaces first.
    """
    words = tuple(_matching(tokenizer, _WORD, count))
    return words or tuple(_matching(tokenizer, _LETTER, 26))


def _matching(tokenizer: Tokenizer, pattern: re.Pattern[str], count: int) -> Iterator[int]:
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        if count == 0:
            return
        text = tokenizer.decode([token_id], skip_special_tokens=True)
        if pattern.fullmatch(text) and tokenizer.encode(text, add_special_tokens=False).ids == [token_id]:
            count -= 1
            yield token_id
