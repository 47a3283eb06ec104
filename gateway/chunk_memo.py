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
from collections.abc import Callable, Iterator

_MAX_CHUNKS = 65_536
_MAX_CHUNK = 32
_FEW = 16
_INDENTED = 40
_WHITE = " \t\n\r\f\v"
_RUN = re.compile(r"\s{2,}|\s\Z", re.ASCII)
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
                known = b"".join(map(self._known.__getitem__, chunks))
            except KeyError:
                pass
            else:
                return self._by_words(first) + known if first else known
        parts: list[bytes] = []
        at = 0
        for start, end in _uncut(text):
            parts.append(self._spaced(text[at:start]))
            parts.append(self._by_words(text[start:end]))
            at = end
        parts.append(self._spaced(text[at:]))
        return b"".join(parts)

    def _spaced(self, text: str) -> bytes:
        """Of a text that may be cut at all of its spaces."""
        if not text:
            return b""
        first, *chunks = text.split(" ")
        found = list(map(self._known.get, chunks))
        missing = [at for at, ids in enumerate(found) if ids is None]
        many = len(missing) > _FEW and 4 * len(missing) > len(chunks)
        if many:
            # The expression finds all of them in less time; some are learnt, and the next time some more.
            ids = self._by_words(text)
            missing = missing[:_FEW]
        for at in missing:
            chunk = chunks[at]
            found[at] = self._by_words(" " + chunk)
            self._add(chunk, found[at])
        if many:
            return ids
        before = self._by_words(first) if first else b""
        return before + b"".join(found)  # type: ignore[arg-type]

    def _add(self, chunk: str, ids: bytes | None) -> None:
        if ids is not None and 0 < len(chunk) <= _MAX_CHUNK:
            if len(self._known) >= _MAX_CHUNKS:
                self._known.clear()
            self._known[chunk] = ids


def _uncut(text: str) -> Iterator[tuple[int, int]]:
    """Where white space is that is no single space, with what stands around it up to the next space that is one: positions of
    the first character, and of the one after the last, which are spaces where they are not the ends of the text."""
    start = end = -1
    for run in _RUN.finditer(text):
        if run.start() > end:
            if end >= 0:
                yield start, end
            start = max(0, text.rfind(" ", max(0, end), run.start()))
        end = text.find(" ", run.end())
        if end < 0:
            yield start, len(text)
            return
    if end >= 0:
        yield start, end
