"""Text with sections of tool calls in it: where a section begins, what stands between its calls, where it ends."""

from __future__ import annotations

from dataclasses import dataclass

from grammar.calls.body import SPACE, CallReader, MakeReader
from grammar.deltas import Delta, TextDelta, ToolCallEnd


@dataclass(frozen=True, slots=True)
class Section:
    """`begin`: the text that opens a section; "": a call can only be the very beginning of the text. `opening`: once, before
    the first call. `after_call`: behind each call. `separator`: between two calls; None: a section has one call. `again`: with
    what a further call begins where there is no separator. `closing`: behind the last call. White space may stand between
    all of them, and whatever comes behind the first call may be missing."""

    begin: str
    opening: str = ""
    after_call: str = ""
    separator: str | None = None
    again: str = ""
    closing: str = ""


class SectionParser:
    """Splits text into TextDelta and the deltas of calls; see `grammar.parser.StreamParser`.

    White space next to a call is dropped, as the chat template writes its own. What begins like a section and is not followed
    by a call of a known tool stays text, to the letter. When a call breaks after its arguments began, it ends incomplete and
    the rest is text. After `most` calls (None: any number) everything is dropped.
    """

    def __init__(self, section: Section, reader: MakeReader, *, most: int | None = None) -> None:
        self._section = section
        self._make = reader
        self._most = most
        self._held = ""  # text that may be white space before a section, or the beginning of something
        self._reader: CallReader | None = None
        self._raw = ""  # the text since the section's begin or the last call, kept until it cannot become text any more
        self._given_up = 0  # how much of `_raw` is text for certain when the call fails; the rest is read again
        self._opening = ""  # what of the section's opening is still to come
        self._calls = 0
        self._had_last_call = False
        self._after_call = False  # only white space came since the last call
        self._between: str | None = None  # "after": a call's end may come; "next": another call or the closing
        self._looking = True  # a section may begin
        self._at_start = not section.begin

    def feed(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        while text and not self._had_last_call:
            if self._reader is not None:
                text = self._feed_call(self._reader, text, out)
            elif self._between is not None:
                text = self._feed_between(text)
            elif self._at_start:
                text = self._feed_start(text)
            else:
                text = self._feed_text(text, out)
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        while self._reader is not None:
            reader = self._reader
            if not self._opening and reader.cut(out):
                self._reader, self._raw = None, ""
                return out
            out.extend(self.feed(self._as_text(out)))
        return out if self._had_last_call else self._flush(out)

    def _flush(self, out: list[Delta]) -> list[Delta]:
        held, self._held = self._held, ""
        if self._between is not None:
            return out  # the beginning of what ends a call or a section
        if self._after_call:
            held = held.lstrip(SPACE)
        if held:
            out.append(TextDelta(held))
        return out

    def _feed_start(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        rest = text.lstrip(SPACE)
        if not rest:
            self._held = text
            return ""
        self._at_start = self._looking = False
        self._begin_call(text[: len(text) - len(rest)], self._section.opening)
        return rest

    def _feed_text(self, text: str, out: list[Delta]) -> str:
        text = self._held + text
        self._held = ""
        begin = self._section.begin
        if not begin or not self._looking:
            self._emit(text, out)
            return ""
        found = text.find(begin)
        if found >= 0:
            before = text[:found]
            # The white space before it is kept with the call, in case the call turns out to be text.
            stripped = before.rstrip(SPACE)
            self._emit(stripped, out)
            self._begin_call(before[len(stripped) :] + begin, self._section.opening)
            return text[found + len(begin) :]
        keep = certain(text, begin)
        self._held = text[keep:]
        self._emit(text[:keep], out)
        return ""

    def _emit(self, text: str, out: list[Delta]) -> None:
        if self._after_call:
            text = text.lstrip(SPACE)
        if text:
            self._after_call = False
            out.append(TextDelta(text))

    def _begin_call(self, raw: str, opening: str) -> None:
        self._raw, self._given_up, self._opening = raw, len(raw), opening
        self._between = None
        self._reader = self._make(self._calls)

    def _feed_call(self, reader: CallReader, text: str, out: list[Delta]) -> str:
        if self._opening:
            return self._feed_opening(text, out)
        at = reader.feed(text, 0, out)
        if reader.failed and not reader.started:
            self._raw += text
            return self._as_text(out)
        if reader.started:
            self._raw = ""
        else:
            self._raw += text[:at]
        if reader.failed:
            out.append(ToolCallEnd(self._calls, complete=False))
            self._calls += 1
            self._reader = None
            if self._most is not None and self._calls >= self._most:
                self._looking = False
        elif reader.done:
            self._calls += 1
            self._reader, self._between, self._after_call = None, "after", True
            self._had_last_call = self._most is not None and self._calls >= self._most
        return text[at:]

    def _feed_opening(self, text: str, out: list[Delta]) -> str:
        stripped = text.lstrip(SPACE) if len(self._opening) == len(self._section.opening) else text
        skipped = len(text) - len(stripped)
        size = 0
        while size < min(len(stripped), len(self._opening)) and stripped[size] == self._opening[size]:
            size += 1
        self._raw += text[: skipped + size]
        self._opening = self._opening[size:]
        if self._opening and size < len(stripped):
            self._raw += stripped[size:]
            return self._as_text(out)
        return stripped[size:]

    def _as_text(self, out: list[Delta]) -> str:
        """Gives back what begins no call; what follows it is read again. Returns what is to be read."""
        raw, given_up = self._raw, self._given_up if self._section.begin else len(self._raw)
        self._reader, self._raw = None, ""
        self._emit(raw[:given_up], out)
        return raw[given_up:]

    def _feed_between(self, text: str) -> str:
        """Behind a call: its end, then another call or the end of the section. Anything else is left to be read as text."""
        section = self._section
        text = self._held + text
        self._held = ""
        rest = text.lstrip(SPACE)
        if self._between == "after":
            if section.after_call and section.after_call.startswith(rest[: len(section.after_call)]):
                if len(rest) < len(section.after_call):
                    self._held = rest
                    return ""
                rest = rest[len(section.after_call) :]
            self._between = "next"
            if rest:
                return rest
            return ""
        following = section.separator or section.again if section.separator is not None else ""
        for literal in (section.closing, following):
            if literal and rest.startswith(literal):
                if literal == section.closing:
                    self._between = None
                    return rest[len(literal) :]
                size = len(literal) if section.separator else 0
                self._begin_call(rest[:size], "")
                self._given_up = max(size, 1)
                return rest[size:]
        if any(literal and literal.startswith(rest) for literal in (section.closing, following)):
            self._held = rest
            return ""
        self._between = None
        return rest


def certain(text: str, tag: str) -> int:
    """How much of the text is certain not to belong to a tag or the white space before one."""
    size = len(text)
    for length in range(min(len(tag) - 1, size), 0, -1):
        if text.endswith(tag[:length]):
            size -= length
            break
    return len(text[:size].rstrip(SPACE))
