"""Thinking regions: `<think>...</think>` at the beginning of an answer, split off before tool calls are looked for."""

from __future__ import annotations

from grammar.deltas import Delta, ReasoningDelta
from grammar.parser import StreamParser

_SPACE = " \t\n\r"


class ReasoningSplitter:
    """A stage in front of another parser. Text up to the end tag is reasoning, the rest is the inner parser's.

    `inside`: the template wrote the begin tag into the prompt, so the text starts within the region. White space next to
    the tags is dropped. An answer that does not begin with the region goes through unchanged.
    """

    def __init__(self, inner: StreamParser, *, begin: str = "<think>", end: str = "</think>", inside: bool = False) -> None:
        self._inner = inner
        self._begin = begin
        self._end = end
        self._state = "inside" if inside else "before"
        self._fresh = True  # nothing but white space came since the region's begin
        self._held = ""

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._state == "inside"

    def feed(self, text: str) -> list[Delta]:
        if self._state == "through":
            return self._inner.feed(text)
        text = self._held + text
        self._held = ""
        if self._state == "before":
            stripped = text.lstrip(_SPACE)
            if stripped.startswith(self._begin):
                self._state = "inside"
                text = stripped[len(self._begin) :]
            elif self._begin.startswith(stripped):
                self._held = text
                return []
            else:
                self._state = "through"
                return self._inner.feed(text)
        if self._state == "inside":
            return self._feed_inside(text)
        return self._feed_after(text)

    def _feed_inside(self, text: str) -> list[Delta]:
        found = text.find(self._end)
        if found >= 0:
            self._state = "after"
            return [*self._reasoning(text[:found].rstrip(_SPACE)), *self._feed_after(text[found + len(self._end) :])]
        keep = len(text)
        for length in range(min(len(self._end) - 1, keep), 0, -1):
            if text.endswith(self._end[:length]):
                keep -= length
                break
        keep = len(text[:keep].rstrip(_SPACE))
        self._held = text[keep:]
        return self._reasoning(text[:keep])

    def _feed_after(self, text: str) -> list[Delta]:
        text = text.lstrip(_SPACE)
        if not text:
            return []
        self._state = "through"
        return self._inner.feed(text)

    def _reasoning(self, text: str) -> list[Delta]:
        if self._fresh:
            text = text.lstrip(_SPACE)
        if not text:
            return []
        self._fresh = False
        return [ReasoningDelta(text)]

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._state == "inside":
            return [*self._reasoning(held.rstrip(_SPACE)), *self._inner.finish()]
        if self._state == "before":
            return [*self._inner.feed(held), *self._inner.finish()]
        return self._inner.finish()
