"""The ids of what stands between single spaces, remembered: a third of what looking up every word takes.

The expressions by which byte-level tokenizers cut text into words have in common that a word begins at every space which stands
alone between two characters that are no white space. Where an expression has none but the alternatives below, this follows from
them: whichever matches that space has it as its first character, since those that may have white space further on match nothing
else, and the character before is none. And nothing that is matched before the space depends on it or on what follows: no class
of these alternatives that ends a word holds a space, and what looks ahead does so from behind white space, of which the last
character before the space is none. Nor does anything look behind. So text that is cut before such spaces has the ids of its
parts, one after the other, and the parts, mostly a word with its punctuation, come again and again.

Around other white space (indentation, double spaces, space at a line's end) text is cut by the expression, word by word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import itemgetter

_MAX_CHUNKS = 65_536
_MAX_CHUNK = 32
_FEW = 8
_INDENTED = 40
_WHITE = " \t\n\r\f\v"
_ALTERNATIVES = frozenset(
    (
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
        *(r" ?\p{L}+", r" ?\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"),
        *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+(?![^\s\p{N}])", r"\s+"),
    )
)
_BAR = re.compile(r"\|(?![^(]*\))")


def cuts_at_spaces(source: str) -> bool:
    """Whether an expression for words has only alternatives of which the above is known."""
    return _ALTERNATIVES.issuperset(_BAR.split(source))


class ChunkMemo:
    """Ids of ASCII text by its chunks. Safe to use from several threads: entries are only ever added, or all dropped."""

    def __init__(self, by_words: Callable[[str], bytes]) -> None:
        """`by_words`: packed ids of a text, word by word."""
        self._by_words = by_words
        # Without the space before them. None of them begins or ends with white space.
        self._known: dict[str, bytes] = {}

    def encode(self, text: str) -> bytes:
        """Packed ids of a text without added tokens."""
        if text.count("  ") * _INDENTED > len(text):
            return self._by_words(text)  # code: more goes by words than not
        chunks = text.split(" ")
        first = chunks[0]
        if not first or first[-1] not in _WHITE:
            del chunks[0]
            try:
                # What is known has no white space at its ends, so that all the spaces were such as text may be cut at.
                ids = itemgetter(*chunks)(self._known) if len(chunks) > 1 else [self._known[chunk] for chunk in chunks]
                known = b"".join(ids)
            except KeyError:
                pass
            else:
                return self._by_words(first) + known if first else known
        return self._in_parts(text)

    def _in_parts(self, text: str) -> bytes:
        """Where not everything is known, or there is other white space than single spaces."""
        chunks = text.split(" ")
        found = list(map(self._known.get, chunks))
        found[0] = None  # no space stands before it
        missing = [at for at, ids in enumerate(found) if ids is None]
        if len(missing) > _FEW and len(missing) * 4 > len(chunks):
            # The expression finds all of them in less time; some are learnt, and the next time some more.
            ids = self._by_words(text)
            for at in missing[1 : _FEW + 1]:
                if _may_cut(chunks, at) and _may_cut(chunks, at + 1):
                    self._learn(chunks[at])
            return ids
        parts: list[bytes] = []
        done = 0
        for at in missing:
            if at < done:
                continue
            start, end = at, at + 1
            while not _may_cut(chunks, start):
                start -= 1
            while not _may_cut(chunks, end):
                end += 1
            parts += found[done:start]  # type: ignore[arg-type]
            if end - start == 1 and start:
                parts.append(self._learn(chunks[at]))
            else:
                parts.append(self._by_words(" " * (start > 0) + " ".join(chunks[start:end])))
            done = end
        parts += found[done:]  # type: ignore[arg-type]
        return b"".join(parts)

    def _learn(self, chunk: str) -> bytes:
        ids = self._by_words(" " + chunk)
        if len(chunk) <= _MAX_CHUNK:
            if len(self._known) >= _MAX_CHUNKS:
                self._known.clear()
            self._known[chunk] = ids
        return ids


def _may_cut(chunks: Sequence[str], at: int) -> bool:
    """Whether a single space stands before the chunk at `at`, between characters that are no white space; or nothing at all."""
    if not 0 < at < len(chunks):
        return True
    before, after = chunks[at - 1], chunks[at]
    return bool(before and after) and before[-1] not in _WHITE and after[0] not in _WHITE
