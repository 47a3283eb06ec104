"""Messages on channels (harmony): reasoning, text and calls, told apart by the header of each message."""

from __future__ import annotations

import re
from collections.abc import Callable

from grammar.calls.body import SPACE
from grammar.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.json_scanner import JsonScanner

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MAX_HEADER = 1024
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class ChannelParser:
    """See `grammar.parser.StreamParser`. The text begins within a header. Text without any header stays text."""

    def __init__(self, names: frozenset[str], call_id: Callable[[], str], *, most: int | None = None) -> None:
        self._names = names
        self._call_id = call_id
        self._most = most
        self._held = ""
        self._in_header = True
        self._kind = "text"
        self._calls = 0
        self._scanner: JsonScanner | None = None  # of the call that is being read

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._kind == "analysis"

    def feed(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        text = self._held + text
        self._held = ""
        while text:
            text = self._header(text, out) if self._in_header else self._body(text, out)
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        held, self._held = self._held, ""
        if self._in_header:
            if held.strip(SPACE) and "<|" not in held:
                out.append(TextDelta(held))
            return out
        self._content(held, out)
        self._end(out)
        return out

    def _header(self, text: str, out: list[Delta]) -> str:
        found = text.find(_MESSAGE)
        if found < 0:
            if len(text) <= _MAX_HEADER:
                self._held = text
                return ""
            self._in_header, self._kind = False, "text"
            return text
        self._in_header = False
        self._open(text[:found], out)
        return text[found + len(_MESSAGE) :]

    def _open(self, header: str, out: list[Delta]) -> None:
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            if self._most is not None and self._calls >= self._most:
                self._kind = "dropped"
                return
            self._kind, self._scanner = "call", JsonScanner()
            out.append(ToolCallStart(self._calls, self._call_id(), recipient[1]))
        elif channel is not None and channel[1] == "analysis":
            self._kind = "analysis"
        else:
            self._kind = "text"

    def _body(self, text: str, out: list[Delta]) -> str:
        ends = [(text.find(end), end) for end in _ENDS if end in text]
        if ends:
            at, end = min(ends)
            self._content(text[:at], out)
            self._end(out)
            return text[at + len(end) :]
        keep = len(text)
        for length in range(min(max(map(len, _ENDS)) - 1, keep), 0, -1):
            if any(end.startswith(text[-length:]) for end in _ENDS):
                keep -= length
                break
        self._held = text[keep:]
        self._content(text[:keep], out)
        return ""

    def _content(self, text: str, out: list[Delta]) -> None:
        if not text:
            return
        if self._kind == "call" and self._scanner is not None:
            end = self._scanner.feed(text)
            if end:
                out.append(ToolCallArguments(self._calls, text[:end]))
            if self._scanner.failed:
                self._end(out)
                self._in_header = False  # what follows in this message is text
                self._content(text[end:], out)
        elif self._kind == "analysis":
            out.append(ReasoningDelta(text))
        elif self._kind == "text":
            out.append(TextDelta(text))

    def _end(self, out: list[Delta]) -> None:
        """The message is over."""
        if self._kind == "call" and self._scanner is not None:
            out.append(ToolCallEnd(self._calls, complete=self._scanner.done))
            self._calls += 1
            self._scanner = None
        self._in_header, self._kind = True, "text"
