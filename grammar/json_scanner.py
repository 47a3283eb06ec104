"""An incremental JSON reader: finds where a value ends in text that comes in pieces, without building it.

Strict (RFC 8259): it stops at the first character that cannot belong to a value, so broken output is noticed at once and
braces or tags inside strings mean nothing.
"""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACE = " \t\n\r"
_SPACES = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_DIGITS = frozenset("0123456789")

# Number states: which characters may follow, and whether the number may end there.
_NUMBER: dict[str, tuple[dict[str, str], bool]] = {
    "-": ({"0": "0", "1-9": "i"}, False),
    "0": ({".": ".", "e": "e"}, True),
    "i": ({"0": "i", "1-9": "i", ".": ".", "e": "e"}, True),
    ".": ({"0": "f", "1-9": "f"}, False),
    "f": ({"0": "f", "1-9": "f", "e": "e"}, True),
    "e": ({"0": "x", "1-9": "x", "+": "s"}, False),
    "s": ({"0": "x", "1-9": "x"}, False),
    "x": ({"0": "x", "1-9": "x"}, True),
}


class _State(Enum):
    VALUE = auto()  # a value must begin
    FIRST_ITEM = auto()  # a value or "]"
    FIRST_KEY = auto()  # a key or "}"
    KEY = auto()  # a key must begin
    COLON = auto()
    AFTER = auto()  # "," or the closing bracket
    STRING = auto()
    ESCAPE = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonScanner:
    """Reads one JSON value. `done`: it is complete; `failed`: the text is not JSON.

    A number at the top ends with the first character that cannot belong to it, which is not consumed.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._stack: list[str] = []
        self._state = _State.VALUE
        self._in_key = False
        self._hex_left = 0
        self._rest_of_literal = ""
        self._number = ""

    def feed(self, text: str, start: int = 0) -> int:
        """Consumes from `start` on; returns the index after the last consumed character."""
        at = start
        end = len(text)
        while at < end and not self.done and not self.failed:
            if self._state is _State.STRING:
                match = _PLAIN.match(text, at)
                at = match.end() if match else at
                if at < end:
                    at += self._string_end(text[at])
            elif self._state in (_State.ESCAPE, _State.NUMBER, _State.LITERAL):
                at += self._inside(text[at])
            else:
                match = _SPACES.match(text, at)
                at = match.end() if match else at
                if at < end:
                    at += self._between(text[at])
        return at

    def _fail(self) -> int:
        self.failed = True
        return 0

    def _string_end(self, char: str) -> int:
        if char == "\\":
            self._state, self._hex_left = _State.ESCAPE, 0
        elif char == '"':
            if self._in_key:
                self._in_key, self._state = False, _State.COLON
            else:
                self._value_ended()
        else:
            return self._fail()
        return 1

    def _inside(self, char: str) -> int:
        """A character inside an escape, a number or a literal; 0 when it belongs to what follows."""
        if self._state is _State.ESCAPE:
            return self._escape(char)
        if self._state is _State.LITERAL:
            if char != self._rest_of_literal[0]:
                return self._fail()
            self._rest_of_literal = self._rest_of_literal[1:]
            if not self._rest_of_literal:
                self._value_ended()
            return 1
        following, may_end = _NUMBER[self._number]
        kind = "1-9" if char in _DIGITS and char != "0" else {"E": "e", "-": "+"}.get(char, char)
        if kind in following:
            self._number = following[kind]
            return 1
        if may_end:
            self._value_ended()
            return 0
        return self._fail()

    def _escape(self, char: str) -> int:
        if self._hex_left:
            if char not in _HEX:
                return self._fail()
            self._hex_left -= 1
            if not self._hex_left:
                self._state = _State.STRING
        elif char == "u":
            self._hex_left = 4
        elif char in '"\\/bfnrt':
            self._state = _State.STRING
        else:
            return self._fail()
        return 1

    def _between(self, char: str) -> int:
        state = self._state
        if state in (_State.FIRST_KEY, _State.KEY) and char == '"':
            self._in_key, self._state = True, _State.STRING
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.AFTER and char == ",":
            self._state = _State.KEY if self._stack[-1] == "{" else _State.VALUE
        elif (char == "}" and state in (_State.FIRST_KEY, _State.AFTER) and self._stack[-1] == "{") or (
            char == "]" and state in (_State.FIRST_ITEM, _State.AFTER) and self._stack[-1] == "["
        ):
            self._stack.pop()
            self._value_ended()
        elif state in (_State.VALUE, _State.FIRST_ITEM):
            return self._value(char)
        else:
            return self._fail()
        return 1

    def _value(self, char: str) -> int:
        if char in "{[":
            self._stack.append(char)
            self._state = _State.FIRST_KEY if char == "{" else _State.FIRST_ITEM
        elif char == '"':
            self._state = _State.STRING
        elif char == "-" or char in _DIGITS:
            self._state, self._number = _State.NUMBER, char if char in "-0" else "i"
        elif char in _LITERALS:
            self._state, self._rest_of_literal = _State.LITERAL, _LITERALS[char][1:]
        else:
            return self._fail()
        return 1

    def _value_ended(self) -> None:
        if self._stack:
            self._state = _State.AFTER
        else:
            self.done = True
