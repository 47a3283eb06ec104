"""A call written in Python: `get_weather(city="Paris", days=3)`, its literals translated to JSON as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

from grammar.calls.body import SPACE
from grammar.calls.named import MAX_NAME
from grammar.deltas import Delta, ToolCallArguments, ToolCallEnd, ToolCallStart

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "{": "}"}
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-.")
_MAX_WORD = 400


class _State(Enum):
    VALUE = auto()
    FIRST = auto()  # a value, a key or the closing bracket
    KEY = auto()
    COLON = auto()
    AFTER = auto()
    STRING = auto()
    ESCAPE = auto()
    WORD = auto()


class PythonLiteral:
    """Reads one literal (string, number, True, False, None, list, dict) and gives it as JSON, spaced as json.dumps does.

    `done`: it is complete; `failed`: the text is none. A number or a word ends with the first character that cannot belong
    to it, which is not consumed.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._state = _State.VALUE
        self._stack: list[str] = []
        self._quote = ""
        self._in_key = False
        self._word = ""
        self._hex_left = 0

    def take(self, char: str, out: list[str]) -> bool:
        """One more character; what it means in JSON is appended. False when it was not consumed."""
        match self._state:
            case _State.STRING:
                return self._string(char, out)
            case _State.ESCAPE:
                return self._escape(char, out)
            case _State.WORD:
                return self._in_word(char, out)
        if char in SPACE:
            return True
        return self._between(char, out)

    def rest(self) -> str:
        """What was read and not given out: the beginning of a number or a word."""
        return self._word if self._state is _State.WORD else ""

    def _fail(self) -> bool:
        self.failed = True
        return False

    def _between(self, char: str, out: list[str]) -> bool:
        state, closing = self._state, self._stack[-1] if self._stack else ""
        if state in (_State.FIRST, _State.AFTER) and char == closing:
            self._stack.pop()
            out.append(char)
            self._ended()
        elif state is _State.AFTER:
            if char != ",":
                return self._fail()
            out.append(", ")
            self._state = _State.KEY if closing == "}" else _State.VALUE
        elif state is _State.COLON:
            if char != ":":
                return self._fail()
            out.append(": ")
            self._state = _State.VALUE
        elif char in "\"'":
            self._in_key = state is _State.KEY or (state is _State.FIRST and closing == "}")
            self._quote, self._state = char, _State.STRING
            out.append('"')
        elif state is _State.KEY or (state is _State.FIRST and closing == "}"):
            return self._fail()
        elif char in _CLOSING:
            self._stack.append(_CLOSING[char])
            self._state = _State.FIRST
            out.append(char)
        elif char in _WORD:
            self._word, self._state = char, _State.WORD
        else:
            return self._fail()
        return True

    def _string(self, char: str, out: list[str]) -> bool:
        if char == self._quote:
            out.append('"')
            if self._in_key:
                self._in_key, self._state = False, _State.COLON
            else:
                self._ended()
        elif char == "\\":
            self._state, self._word, self._hex_left = _State.ESCAPE, "", 0
        elif char == "\n":
            return self._fail()
        else:
            out.append(json.dumps(char, ensure_ascii=False)[1:-1])
        return True

    def _escape(self, char: str, out: list[str]) -> bool:
        if self._hex_left:
            if char not in "0123456789abcdefABCDEF":
                return self._fail()
            self._word += char
            self._hex_left -= 1
            if self._hex_left:
                return True
            code = int(self._word, 16)
            if code > 0x10FFFF:
                return self._fail()
            out.append(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else json.dumps(chr(code), ensure_ascii=False)[1:-1])
        elif char in _HEX:
            self._hex_left = _HEX[char]
            return True
        else:
            text = _SIMPLE.get(char, char if char in "\\'\"/" else "\\" + char)
            out.append(json.dumps(text, ensure_ascii=False)[1:-1])
        self._state = _State.STRING
        return True

    def _in_word(self, char: str, out: list[str]) -> bool:
        if char in _WORD:
            self._word += char
            return True if len(self._word) < _MAX_WORD else self._fail()
        word = _WORDS.get(self._word) or (self._word if _NUMBER.fullmatch(self._word) else None)
        if word is None:
            return self._fail()
        out.append(word)
        self._ended()
        return False

    def _ended(self) -> None:
        if self._stack:
            self._state = _State.AFTER
        else:
            self.done = True


class _Expect(Enum):
    NAME = auto()
    FIRST = auto()  # a keyword or ")"
    KEYWORD = auto()
    VALUE = auto()
    AFTER = auto()  # "," or ")"


class PythonCall:
    """Reads one call with keyword arguments; see `grammar.calls.body.CallReader`."""

    def __init__(self, index: int, names: frozenset[str], call_id: Callable[[], str]) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self._index = index
        self._names = names
        self._call_id = call_id
        self._expect = _Expect.NAME
        self._read = ""
        self._name: str | None = None
        self._fields = 0
        self._literal = PythonLiteral()

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        at = start
        written: list[str] = []
        while at < len(text) and not self.done and not self.failed:
            if self._expect is _Expect.VALUE:
                at += self._literal.take(text[at], written)
                self.failed = self._literal.failed
                if self._literal.done:
                    self._expect = _Expect.AFTER
            else:
                at += self._character(text[at], written, out)
        self._give(written, out)
        if self.done:
            out.append(ToolCallEnd(self._index))
        return at

    def cut(self, out: list[Delta]) -> bool:
        if self.failed or self._name is None:
            return False
        self._start(out)
        self._give([self._literal.rest()] if self._expect is _Expect.VALUE else [], out)
        out.append(ToolCallEnd(self._index, complete=self.done))
        return True

    def _give(self, written: list[str], out: list[Delta]) -> None:
        text = "".join(written)
        if text:
            out.append(ToolCallArguments(self._index, text))

    def _character(self, char: str, written: list[str], out: list[Delta]) -> int:
        if char in SPACE and (self._expect is not _Expect.NAME or not self._read):
            return 1
        match self._expect:
            case _Expect.NAME:
                if char == "(":
                    self.failed = self._read not in self._names
                    self._name, self._read, self._expect = self._read, "", _Expect.FIRST
                else:
                    self._read += char
                    self.failed = len(self._read) > MAX_NAME
            case _Expect.FIRST | _Expect.AFTER if char == ")":
                self._start(out)
                written.append("}" if self._fields else "{}")
                self.done = True
            case _Expect.AFTER:
                self.failed = char != ","
                self._expect = _Expect.KEYWORD
            case _Expect.FIRST | _Expect.KEYWORD if char == "=" and self._read:
                self._start(out)
                written.append(f"{', ' if self._fields else '{'}{json.dumps(self._read, ensure_ascii=False)}: ")
                self._fields += 1
                self._read, self._literal, self._expect = "", PythonLiteral(), _Expect.VALUE
            case _:
                self._read += char
                self._expect = _Expect.KEYWORD
                self.failed = len(self._read) > MAX_NAME or not self._read.isidentifier()
        return 0 if self.failed else 1

    def _start(self, out: list[Delta]) -> None:
        if not self.started and self._name is not None:
            self.started = True
            out.append(ToolCallStart(self._index, self._call_id(), self._name))
