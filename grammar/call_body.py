"""One tool call written as a JSON object, read as it comes: {"name": "...", "arguments": {...}} in any key order."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import msgspec

from grammar.deltas import Delta, ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.json_scanner import JsonScanner

_SPACE = " \t\n\r"


class _Expect(Enum):
    OPEN = auto()
    KEY_OR_CLOSE = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_CLOSE = auto()


class CallBody:
    """Reads one call. `started`: its ToolCallStart is out and cannot be taken back; `done`: the object is closed;
    `failed`: it is no call of a known tool.

    The start is held until the name is known and the arguments have begun (or the object is closed without any), so that
    everything that fails before can still become text.
    """

    def __init__(self, index: int, names: frozenset[str], arguments_key: str, call_id: Callable[[], str]) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self._index = index
        self._names = names
        self._arguments_key = arguments_key
        self._call_id = call_id
        self._expect = _Expect.OPEN
        self._scanner: JsonScanner | None = None
        self._scanned: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._early_arguments: list[str] = []
        self._has_arguments = False

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        """Consumes from `start` on and appends deltas; returns the index after the last consumed character."""
        at = start
        while at < len(text) and not self.done and not self.failed:
            if self._scanner is not None:
                at = self._scan(self._scanner, text, at, out)
            elif text[at] in _SPACE:
                at += 1
            elif self._expect is _Expect.VALUE:
                self._begin_value(text[at])
            else:
                at += self._punctuation(text[at], out)
        return at

    def cut(self, out: list[Delta]) -> bool:
        """The text ends inside the call. False when it had not come far enough to count as a call."""
        if self.failed or self._name is None:
            return False
        self._start(out)
        out.append(ToolCallEnd(self._index, complete=self.done))
        return True

    def _punctuation(self, char: str, out: list[Delta]) -> int:
        expect = self._expect
        if expect is _Expect.OPEN and char == "{":
            self._expect = _Expect.KEY_OR_CLOSE
        elif expect in (_Expect.KEY_OR_CLOSE, _Expect.KEY) and char == '"':
            self._scanner, self._scanned = JsonScanner(), []
            return 0
        elif expect is _Expect.COLON and char == ":":
            self._expect = _Expect.VALUE
        elif expect is _Expect.COMMA_OR_CLOSE and char == ",":
            self._expect = _Expect.KEY
        elif expect in (_Expect.KEY_OR_CLOSE, _Expect.COMMA_OR_CLOSE) and char == "}":
            self._close(out)
        else:
            self.failed = True
        return 0 if self.failed else 1

    def _begin_value(self, char: str) -> None:
        if self._key == "name":
            self.failed = char != '"' or self._name is not None
        elif self._key == self._arguments_key:
            self.failed = char != "{" or self._has_arguments
            self._has_arguments = True
        if not self.failed:
            self._scanner, self._scanned = JsonScanner(), []

    def _scan(self, scanner: JsonScanner, text: str, at: int, out: list[Delta]) -> int:
        end = scanner.feed(text, at)
        piece = text[at:end]
        is_key = self._expect is not _Expect.VALUE
        if not is_key and self._key == self._arguments_key:
            if self._name is None:
                self._early_arguments.append(piece)
            else:
                self._start(out)
                if piece:
                    out.append(ToolCallArguments(self._index, piece))
        elif is_key or self._key == "name":
            self._scanned.append(piece)
        if scanner.failed:
            self.failed = True
        elif scanner.done:
            self._scanner = None
            if is_key:
                self._key, self._expect = self._string(), _Expect.COLON
            else:
                if self._key == "name":
                    self._named(self._string(), out)
                self._expect = _Expect.COMMA_OR_CLOSE
        return end

    def _string(self) -> str:
        try:
            return msgspec.json.decode("".join(self._scanned), type=str)
        except msgspec.DecodeError:  # a lone surrogate: valid for the scanner, but no text
            self.failed = True
            return ""

    def _named(self, name: str, out: list[Delta]) -> None:
        if name not in self._names:
            self.failed = True
            return
        self._name = name
        if self._early_arguments:
            self._start(out)

    def _start(self, out: list[Delta]) -> None:
        if self.started or self._name is None:
            return
        self.started = True
        out.append(ToolCallStart(self._index, self._call_id(), self._name))
        if self._early_arguments:
            out.append(ToolCallArguments(self._index, "".join(self._early_arguments)))
            self._early_arguments = []

    def _close(self, out: list[Delta]) -> None:
        if self._name is None:
            self.failed = True
            return
        self._start(out)
        if not self._has_arguments:
            out.append(ToolCallArguments(self._index, "{}"))
        out.append(ToolCallEnd(self._index))
        self.done = True
