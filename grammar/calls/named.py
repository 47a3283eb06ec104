"""A call whose name stands before its arguments: `name[ARGS]{...}` of Mistral, `function<sep>name ... {...}` of DeepSeek."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from grammar.calls.body import SPACE
from grammar.deltas import Delta, ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.json_scanner import JsonScanner

MAX_NAME = 512
"""Characters after which what should be a name is none."""


class _Expect(Enum):
    PREFIX = auto()
    NAME = auto()
    ARGUMENTS = auto()


class NamedCall:
    """Reads `prefix name separator {arguments}`; see `grammar.calls.body.CallReader`. White space may stand before each."""

    def __init__(
        self, index: int, names: frozenset[str], call_id: Callable[[], str], *, separator: str, prefix: str = ""
    ) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self._index = index
        self._names = names
        self._call_id = call_id
        self._prefix = prefix
        self._separator = separator
        self._expect = _Expect.PREFIX if prefix else _Expect.NAME
        self._read = ""
        self._scanner = JsonScanner()

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        at = start
        while at < len(text) and not self.done and not self.failed:
            if self._expect is _Expect.ARGUMENTS and (self._read or text[at] not in SPACE):
                return self._arguments(text, at, out)
            self._character(text[at])
            at += not self.failed
        return at

    def cut(self, out: list[Delta]) -> bool:
        if self.failed or self._expect is not _Expect.ARGUMENTS:
            return False
        if not self.started:
            out.append(ToolCallStart(self._index, self._call_id(), self._name))
        out.append(ToolCallEnd(self._index, complete=self.done))
        return True

    def _character(self, char: str) -> None:
        if char in SPACE and not self._read:
            return
        read = self._read + char
        if self._expect is _Expect.PREFIX:
            if not self._prefix.startswith(read):
                self.failed = True
            elif read == self._prefix:
                self._expect, read = _Expect.NAME, ""
        elif self._expect is _Expect.NAME:
            if read.endswith(self._separator):
                self._name = read[: -len(self._separator)].strip(SPACE)
                self.failed = self._name not in self._names
                self._expect, read = _Expect.ARGUMENTS, ""
            elif len(read) > MAX_NAME:
                self.failed = True
        if not self.failed:
            self._read = read

    def _arguments(self, text: str, at: int, out: list[Delta]) -> int:
        if not self._read:
            if text[at] != "{":
                self.failed = True
                return at
            self._read = "{"
            self.started = True
            out.append(ToolCallStart(self._index, self._call_id(), self._name))
        end = self._scanner.feed(text, at)
        if end > at:
            out.append(ToolCallArguments(self._index, text[at:end]))
        self.failed = self._scanner.failed
        if self._scanner.done:
            self.done = True
            out.append(ToolCallEnd(self._index))
        return end
