"""A call written as a list of fields, each with its own name and value: Qwen3-Coder's and GLM's XML.

Values of strings are written as they are, without quotes or escapes, and end with the first text that ends a value; all others
as JSON, in whose strings that text means nothing. What comes out is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from grammar.calls.body import SPACE
from grammar.calls.named import MAX_NAME
from grammar.calls.values import STRING, value_json, value_types
from grammar.deltas import Delta, ToolCallArguments, ToolCallEnd, ToolCallStart


@dataclass(frozen=True, slots=True)
class FieldSyntax:
    """How a call of fields is written.

    `name_end` "": the name ends before white space or `<`. `value_begin` "": a value follows its key at once, and one that
    begins on a line of its own ends with one; neither line end belongs to it. `close` ends the call.
    """

    name_begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    close: str


class _Expect(Enum):
    NAME_BEGIN = auto()
    NAME = auto()
    FIELD = auto()
    KEY = auto()
    VALUE_BEGIN = auto()
    FIRST_OF_VALUE = auto()
    VALUE = auto()


class FieldsCall:
    """Reads one call; see `grammar.calls.body.CallReader`. `parameters`: the JSON Schemas of the tools that may be called."""

    def __init__(
        self,
        index: int,
        syntax: FieldSyntax,
        parameters: Mapping[str, Mapping[str, Any] | None],
        call_id: Callable[[], str],
    ) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self._index = index
        self._syntax = syntax
        self._parameters = parameters
        self._call_id = call_id
        self._expect = _Expect.NAME_BEGIN if syntax.name_begin else _Expect.NAME
        self._read = ""  # of what is expected
        self._name: str | None = None
        self._fields = 0
        self._types = STRING
        self._end = ""
        self._value = ""  # not given out yet
        self._open = False  # the quote of a string is out
        self._nested: _NestedEnd | None = None  # where an array or object ends, once it is known to be one

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        at = start
        while at < len(text) and not self.done and not self.failed:
            if self._expect is _Expect.VALUE:
                at = self._feed_value(text, at, out)
            else:
                at += self._character(text[at], out)
        return at

    def cut(self, out: list[Delta]) -> bool:
        if self.failed or self._name is None:
            return False
        self._start(out)
        if self._expect is _Expect.VALUE and self._value:
            self._write(self._piece(self._value) if self._types == STRING else self._value, out)
        out.append(ToolCallEnd(self._index, complete=self.done))
        return True

    def _character(self, char: str, out: list[Delta]) -> int:
        """Takes one character of what is not a value; 0 when it belongs to something else."""
        syntax = self._syntax
        match self._expect:
            case _Expect.NAME_BEGIN:
                self._literal(char, ((syntax.name_begin, _Expect.NAME),))
            case _Expect.NAME:
                return self._feed_name(char)
            case _Expect.FIELD:
                if self._literal(char, ((syntax.key_begin, _Expect.KEY), (syntax.close, _Expect.FIELD))) is _Expect.FIELD:
                    self._close(out)
            case _Expect.KEY:
                self._read += char
                if self._read.endswith(syntax.key_end):
                    self._begin_field(self._read[: -len(syntax.key_end)], out)
                self.failed = len(self._read) > MAX_NAME
            case _Expect.VALUE_BEGIN:
                if self._literal(char, ((syntax.value_begin, _Expect.VALUE),)) is _Expect.VALUE:
                    self._begin_value(syntax.value_end)
            case _Expect.FIRST_OF_VALUE:
                own_line = char == "\n"
                self._begin_value("\n" * own_line + syntax.value_end)
                return int(own_line)
            case _Expect.VALUE:
                raise RuntimeError("a value is read by _feed_value")
        return 0 if self.failed else 1

    def _literal(self, char: str, options: tuple[tuple[str, _Expect], ...]) -> _Expect | None:
        """One more character of one of these texts, before which white space may stand. What follows, once one is whole."""
        if not self._read and char in SPACE:
            return None
        self._read += char
        if not any(literal.startswith(self._read) for literal, _ in options):
            self.failed = True
        for literal, following in options:
            if self._read == literal:
                self._expect, self._read = following, ""
                return following
        return None

    def _feed_name(self, char: str) -> int:
        end = self._syntax.name_end
        if not end and char in SPACE and not self._read:
            return 1
        if end:
            self._read += char
            if not self._read.endswith(end):
                self.failed = len(self._read) > MAX_NAME
                return int(not self.failed)
            name, used = self._read[: -len(end)], 1
        elif char in SPACE or char == "<":
            name, used = self._read, int(char in SPACE)
        else:
            self._read += char
            self.failed = len(self._read) > MAX_NAME
            return int(not self.failed)
        if name not in self._parameters:
            self.failed = True
            return 0
        self._name, self._expect, self._read = name, _Expect.FIELD, ""
        return used

    def _begin_field(self, key: str, out: list[Delta]) -> None:
        self._start(out)
        self._write(f"{', ' if self._fields else '{'}{json.dumps(key, ensure_ascii=False)}: ", out)
        self._fields += 1
        self._types = value_types(self._parameters[self._name or ""], key)
        self._read = ""
        if self._syntax.value_begin:
            self._expect = _Expect.VALUE_BEGIN
        else:
            self._expect = _Expect.FIRST_OF_VALUE

    def _begin_value(self, end: str) -> None:
        self._end, self._value, self._open, self._nested = end, "", False, None
        self._expect = _Expect.VALUE

    def _feed_value(self, text: str, at: int, out: list[Delta]) -> int:
        held = self._value
        value = held + text[at:]
        if self._nested is None and "string" not in self._types and value.lstrip().startswith(("[", "{")):
            self._nested = _NestedEnd(self._end)
        if self._nested is not None:
            found = self._nested.find(value)
        else:
            found = value.find(self._end, max(0, len(held) - len(self._end) + 1))
        if found >= 0:
            self._value = ""
            self._give(value[:found], out, last=True)
            self._expect = _Expect.FIELD
            return at + found + len(self._end) - len(held)
        keep = len(value)
        if self._types == STRING:
            for length in range(min(len(self._end) - 1, keep), 0, -1):
                if value.endswith(self._end[:length]):
                    keep -= length
                    break
            self._give(value[:keep], out)
            value = value[keep:]
        self._value = value
        return len(text)

    def _give(self, value: str, out: list[Delta], *, last: bool = False) -> None:
        if self._types != STRING:
            self._write(value_json(value, self._types), out)
            return
        if value or last:
            self._write(self._piece(value) + '"' * last, out)

    def _piece(self, value: str) -> str:
        quote = "" if self._open else '"'
        self._open = True
        return quote + json.dumps(value, ensure_ascii=False)[1:-1]

    def _write(self, text: str, out: list[Delta]) -> None:
        if text:
            out.append(ToolCallArguments(self._index, text))

    def _start(self, out: list[Delta]) -> None:
        if not self.started and self._name is not None:
            self.started = True
            out.append(ToolCallStart(self._index, self._call_id(), self._name))

    def _close(self, out: list[Delta]) -> None:
        self._start(out)
        self._write("}" if self._fields else "{}", out)
        out.append(ToolCallEnd(self._index))
        self.done = True


class _NestedEnd:
    """Finds a text behind a JSON array or object that comes in pieces, passing over the strings in it."""

    def __init__(self, end: str) -> None:
        self._end = end
        self._seen = 0
        self._in_string = False

    def find(self, value: str) -> int:
        """Where it begins in the value, which is what was given before and more; -1 while it is not there whole."""
        at = self._seen
        while at < len(value):
            char = value[at]
            if self._in_string and char == "\\":
                if at + 1 == len(value):
                    break
                at += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string and char == self._end[0]:
                if value.startswith(self._end, at):
                    return at
                if self._end.startswith(value[at:]):
                    break
            at += 1
        self._seen = at
        return -1
