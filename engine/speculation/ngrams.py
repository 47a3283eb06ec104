"""Drafts from what the sequence itself holds: what followed the last time these tokens stood here.

Agents repeat themselves: names of tools, keys of arguments, file contents that they quote. The longest end of the sequence that
stands somewhere before is found, and what came after it is drafted (prompt lookup decoding, Saxena 2023; vLLM's n-gram drafts).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]

MIN_MATCH = 3
"""Tokens that must agree before a continuation is worth a try."""

_MAX_MATCH = 16
_CANDIDATES = 64


def continuation(history: Tokens, limit: int, min_match: int = MIN_MATCH) -> list[int]:
    """Up to `limit` tokens that followed the latest of the longest matches of the end of `history`, uint32 [N]. [] where fewer
    than `min_match` tokens match. One pass over the history; only the last few places are compared further."""
    size = len(history)
    if limit < 1 or size <= min_match:
        return []
    ends = np.flatnonzero(history[:-1] == history[-1])[-_CANDIDATES:]
    length = 0
    while len(ends) and length < _MAX_MATCH:
        length += 1
        further = ends[ends >= length]
        further = further[history[further - length] == history[size - 1 - length]] if length < size else further[:0]
        if not len(further):
            break
        ends = further
    if not len(ends) or length < min_match:
        return []
    start = int(ends[-1]) + 1
    return [int(token) for token in history[start : start + limit]]


class History:
    """Prompt and output of one sequence in one array that grows with it."""

    __slots__ = ("_size", "_tokens")

    def __init__(self, prompt: Tokens) -> None:
        self._tokens: Tokens = np.empty(len(prompt) + 256, dtype=np.uint32)
        self._tokens[: len(prompt)] = prompt
        self._size = len(prompt)

    def tokens(self, prompt_tokens: int, output: list[int]) -> Tokens:
        """uint32 [N]: all of them. `output` only ever grows."""
        fresh = output[self._size - prompt_tokens :]
        end = self._size + len(fresh)
        if end > len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty(max(end, 256), dtype=np.uint32)))
        self._tokens[self._size : end] = fresh
        self._size = end
        return self._tokens[:end]
