"""A tokenizer.json as XGrammar wants to know it, read without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer


class _AddedToken(msgspec.Struct):
    id: int
    content: str = ""
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens`: the written form of every id below `vocab_size`, "" where there is none. `backend`: the file's text.

    Special tokens are "" as well: they have no text, so a grammar must not take "<|im_start|>" for twelve characters of a
    JSON string. `stop_token_ids` keep theirs. `specials`: the special tokens a grammar may name, by their written form.
    """

    tokens: list[str]
    backend: str
    stop_token_ids: tuple[int, ...]
    specials: Mapping[str, int]


def read_vocabulary(tokenizer_json: Path | str, vocab_size: int, stop_token_ids: Sequence[int]) -> Vocabulary:
    """Raises ValueError for stop tokens outside the vocabulary, OSError and msgspec errors for a file that is none."""
    if not stop_token_ids:
        raise ValueError("A grammar needs at least one stop token to end with; the model's configuration names none.")
    for token_id in stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"Stop token {token_id} lies outside the vocabulary of {vocab_size} tokens.")
    backend = Path(tokenizer_json).read_text(encoding="utf-8")
    added = [token for token in msgspec.json.decode(backend, type=_TokenizerFile).added_tokens if token.special]
    special = {token.id for token in added}
    tokens = [""] * vocab_size
    for token, token_id in Tokenizer.from_str(backend).get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and (token_id not in special or token_id in stop_token_ids):
            tokens[token_id] = token
    named = {token.content: token.id for token in added if token.id < vocab_size and token.id not in stop_token_ids}
    return Vocabulary(tokens, backend, tuple(dict.fromkeys(stop_token_ids)), named)
