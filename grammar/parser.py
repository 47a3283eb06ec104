"""Streaming parsers: generated text to deltas, the same deltas however the text is cut."""

from __future__ import annotations

from typing import Protocol

from grammar.deltas import Delta, TextDelta


class StreamParser(Protocol):
    """One parser per choice of one request. `feed` any number of times, then `finish` once."""

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece of generated text (whole characters). Returns what has become certain, in order."""

    def finish(self) -> list[Delta]:
        """The generation is over: returns what was held back. A call that was cut ends with `complete=False`."""


class TextParser:
    """For turns whose text is never a tool call: everything is text."""

    def feed(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []
