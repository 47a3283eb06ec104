"""What a regular expression of a schema would cost and whether it can be enforced, found without compiling it.

XGrammar 0.2.9 unrolls counted repetition (`^.{0,5000}$` takes seconds), refuses some constructs, and writes characters that
JSON must escape as they are where a pattern asks for them. All three are answered here, in microseconds. The syntax is
ECMA-262's as far as XGrammar reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

MAX_GROUP_DEPTH = 50
_CONTROL_ESCAPES = frozenset("nrtfv0")
_UNSUPPORTED_ESCAPES = {
    "p": "the Unicode property class \\p{...}",
    "P": "the Unicode property class \\P{...}",
    "b": "the word boundary \\b",
    "B": "the word boundary \\B",
    "k": "the backreference \\k",
    **{digit: f"the backreference \\{digit}" for digit in "123456789"},
}


LOOKAHEAD = re.compile(r"\(\?[=!]")
"""XGrammar takes lookahead, and does not hold it."""


def can_be_checked(pattern: str) -> bool:
    """Whether a validator can search strings for it afterwards (Python's syntax, which is nearly ECMA's)."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


class PatternRefused(Exception):  # noqa: N818 - it is an answer to the caller
    """The pattern is not valid or cannot be enforced. `message` is the rest of a sentence that begins with "the pattern"."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True)
class PatternInfo:
    """`size`: how many single-character steps the pattern has after its counted repetitions are written out.
    `text`: the same pattern as XGrammar has to get it: in ASCII, which makes it respect JSON's escapes, and matching the
    whole string."""

    size: int
    text: str


def examine_pattern(pattern: str) -> PatternInfo:
    """Reads a pattern once. Raises PatternRefused."""
    if not pattern.isascii():
        pattern = _NON_ASCII.sub(_in_ascii, pattern)
    reader = _Reader(pattern)
    size = reader.read()
    return PatternInfo(size, _as_whole_match(pattern, reader.bars, reader.anchors))


def _as_whole_match(pattern: str, bars: list[int], anchors: list[int]) -> str:
    """XGrammar matches whole strings and ignores anchors; JSON Schema searches. "^a|b" becomes "^(?:a.*|.*b.*)$"."""
    ends = [-1, *bars, len(pattern)]
    alternatives = []
    seen = 0
    for left, right in pairwise(ends):
        start, stop = left + 1, right
        opened, closed = start in anchors, stop - 1 in anchors and pattern[stop - 1] == "$"
        opened = opened and pattern[start] == "^"
        seen += opened + closed
        body = pattern[start + opened : stop - closed] if start + opened <= stop - closed else ""
        alternatives.append(("" if opened else ".*") + body + ("" if closed else ".*"))
    if seen != len(anchors):
        return pattern  # an anchor in the middle: only a match of the whole string is sure to respect it
    if len(alternatives) == 1:
        return f"^{alternatives[0]}$"
    return f"^(?:{'|'.join(alternatives)})$"


_NON_ASCII = re.compile(r"\\(.)|([^\x00-\x7f])", re.DOTALL)


def _in_ascii(match: re.Match[str]) -> str:
    char = match[1] or match[2]
    return match[0] if char.isascii() else f"\\u{{{ord(char):x}}}"


class _Reader:
    """A recursive-descent reader that computes sizes instead of building a tree."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self.bars: list[int] = []
        self.anchors: list[int] = []

    def read(self) -> int:
        size = self._alternatives(0)
        if self._at < len(self._pattern):
            self._refuse("has a ')' without '('")
        return size

    def _refuse(self, why: str) -> NoReturn:
        raise PatternRefused(f"{why} (at character {self._at})")

    def _peek(self) -> str:
        return self._pattern[self._at] if self._at < len(self._pattern) else ""

    def _take(self) -> str:
        char = self._peek()
        self._at += 1
        return char

    def _alternatives(self, depth: int) -> int:
        if depth > MAX_GROUP_DEPTH:
            self._refuse(f"nests groups deeper than {MAX_GROUP_DEPTH}")
        size = self._sequence(depth)
        while self._peek() == "|":
            if depth == 0:
                self.bars.append(self._at)
            self._at += 1
            size += self._sequence(depth)
        return size

    def _sequence(self, depth: int) -> int:
        size = 0
        while self._peek() not in ("", "|", ")"):
            quantifiable, atom = self._atom(depth)
            size += self._quantified(quantifiable, atom)
        return size

    def _atom(self, depth: int) -> tuple[bool, int]:
        char = self._take()
        if char in "^$":
            self.anchors.append(self._at - 1)
            return False, 0
        if char == "(":
            return True, self._group(depth)
        if char == "[":
            self._char_class()
            return True, 1
        if char == "\\":
            self._escape()
            return True, 1
        if char in "*+?":
            self._refuse(f"has a {char!r} with nothing to repeat")
        if char == "{":
            self._refuse("has a '{' that is no repetition count; write it as \\{")
        if char == '"' or ord(char) < 0x20:
            self._refuse_escaped()
        return True, 1

    def _refuse_escaped(self) -> NoReturn:
        self._refuse("asks for a quote, a backslash or a control character, which JSON must escape; that cannot be enforced")

    def _group(self, depth: int) -> int:
        if self._peek() == "?":
            self._at += 1
            rest = self._pattern[self._at : self._at + 2]
            if rest[:1] in (":", "=", "!"):
                self._at += 1
            elif rest in ("<=", "<!"):
                self._refuse("uses lookbehind, which cannot be enforced")
            elif rest[:1] == "<" or rest == "P<":
                end = self._pattern.find(">", self._at)
                if end < 0:
                    self._refuse("has an unfinished group name")
                self._at = end + 1
            else:
                self._refuse("uses a group flag, which cannot be enforced")
        size = self._alternatives(depth + 1)
        if self._take() != ")":
            self._refuse("has a '(' that is never closed")
        return size

    def _escape(self) -> None:
        char = self._take()
        if not char:
            self._refuse("ends in the middle of an escape")
        if char in _UNSUPPORTED_ESCAPES:
            self._refuse(f"uses {_UNSUPPORTED_ESCAPES[char]}, which cannot be enforced; write out a character class instead")
        if char in _CONTROL_ESCAPES or char in '"\\c':
            self._refuse_escaped()
        if char in "xu" and self._code_point(char) in _MUST_ESCAPE:
            self._refuse_escaped()

    def _code_point(self, kind: str) -> int:
        """Reads what follows \\x or \\u."""
        if kind == "u" and self._peek() == "{":
            end = self._pattern.find("}", self._at)
            digits = self._pattern[self._at + 1 : end] if end > 0 else ""
            width = len(digits) + 2
        else:
            width = 2 if kind == "x" else 4
            digits = self._pattern[self._at : self._at + width]
            if len(digits) < width:
                digits = ""
        try:
            code = int(digits, 16)
        except ValueError:
            self._refuse(f"has an unfinished \\{kind} escape")
        self._at += width
        return code

    def _char_class(self) -> None:
        """XGrammar leaves characters that JSON must escape out of a class, so something else has to be in it."""
        excluding = self._peek() == "^"
        if excluding:
            self._at += 1
        if self._peek() in ("]", ""):
            self._refuse("has an empty character class; write [\\s\\S] for any character")
        writable = excluding
        while (first := self._class_member()) is not None:
            last = first
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._class_member() or _SET
                if _SET not in (first, last) and last < first:
                    self._refuse("has a character range whose end comes before its start")
            writable = writable or first == _SET or last == _SET or any(c not in _MUST_ESCAPE for c in (first, last))
        if not writable:
            self._refuse_escaped()

    def _class_member(self) -> int | None:
        """The code point of the next member of a class, _SET for a shorthand such as \\d, None at the closing bracket."""
        char = self._take()
        if char == "]":
            return None
        if not char:
            self._refuse("has a '[' that is never closed")
        if char != "\\":
            return ord(char)
        char = self._take()
        if char in ("p", "P"):
            self._refuse(f"uses {_UNSUPPORTED_ESCAPES[char]}, which cannot be enforced; list the characters instead")
        if char in ("", "b", "c"):
            self._refuse("has an escape in a character class that cannot be enforced")
        if char in ("x", "u"):
            return self._code_point(char)
        if char in _CONTROL_ESCAPES:
            return 0
        return _SET if char in "dDwWsS" else ord(char)

    def _quantified(self, quantifiable: bool, atom: int) -> int:
        """Reads the quantifier behind an atom of this size, if there is one; returns the size of both."""
        times = 1
        while (char := self._peek()) and char in "*+?{":
            if not quantifiable:
                self._refuse(f"repeats an anchor with {char!r}")
            self._at += 1
            if char == "{":
                times *= self._count()
            if self._peek() == "?":
                self._at += 1
        return atom * times

    def _count(self) -> int:
        """The larger number of {n}, {n,} or {n,m}; the brace is already read."""
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at : max(end, self._at)].partition(",")
        if not _is_number(low) or not (high == "" or _is_number(high)):
            self._refuse("has a '{' that is no repetition count; write it as \\{")
        if comma and high and int(high) < int(low):
            self._refuse(f"repeats at least {low} and at most {high} times")
        self._at = end + 1
        return max(int(high or low), 1)


def _is_number(text: str) -> bool:
    return 0 < len(text) < 10 and text.isascii() and text.isdigit()


_MUST_ESCAPE = frozenset([*range(0x20), 0x22, 0x5C])
_SET = -1
