"""Text with tool calls between tags, each a JSON object: the streaming parser of Hermes and its relatives."""

from __future__ import annotations

from collections.abc import Callable

from grammar.call_body import CallBody
from grammar.deltas import Delta, TextDelta, ToolCallEnd

_SPACE = " \t\n\r"


class TaggedCallParser:
    """Splits text into TextDelta and the deltas of calls; see `grammar.parser.StreamParser`.

    White space next to a call is dropped, as the chat template writes its own. A tag that is not followed by a call of a
    known tool stays text, to the letter. When a call breaks after its arguments began, it ends incomplete and the rest is
    text. Without `parallel`, everything after the first call is dropped.
    """

    def __init__(
        self,
        begin: str,
        end: str,
        names: frozenset[str],
        call_id: Callable[[], str],
        *,
        arguments_key: str = "arguments",
        parallel: bool = True,
    ) -> None:
        self._begin = begin
        self._end = end
        self._names = names
        self._call_id = call_id
        self._arguments_key = arguments_key
        self._parallel = parallel
        self._held = ""  # text that may be white space before a tag, or the beginning of one
        self._body: CallBody | None = None
        self._raw = ""  # the text of the call since its tag, kept until it cannot become text any more
        self._calls = 0
        self._had_last_call = False
        self._after_call = False  # only white space came since the last call
        self._expects_end = False  # a call's object is closed, its end tag has not come yet

    def feed(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        while text and not self._had_last_call:
            if self._body is not None:
                text = self._feed_call(self._body, text, out)
            elif self._expects_end:
                text = self._feed_end_tag(text)
            else:
                text = self._feed_text(text, out)
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        while self._body is not None:
            body, raw = self._body, self._raw
            self._body, self._raw = None, ""
            if body.cut(out):
                return out
            out.extend(self.feed(self._as_text(raw, out)))
        return out if self._had_last_call else self._flush(out)

    def _flush(self, out: list[Delta]) -> list[Delta]:
        held, self._held = self._held, ""
        if self._expects_end:
            return out  # the beginning of an end tag
        if self._after_call:
            held = held.lstrip(_SPACE)
        if held:
            out.append(TextDelta(held))
        return out

    def _feed_text(self, text: str, out: list[Delta]) -> str:
        text = self._held + text
        self._held = ""
        found = text.find(self._begin)
        if found >= 0:
            before = text[:found]
            text = text[found + len(self._begin) :]
            self._open(before, out)
            return text
        keep = _kept(text, self._begin)
        self._held = text[keep:]
        self._emit(text[:keep], out)
        return ""

    def _emit(self, text: str, out: list[Delta]) -> None:
        if self._after_call:
            text = text.lstrip(_SPACE)
        if text:
            self._after_call = False
            out.append(TextDelta(text))

    def _open(self, before: str, out: list[Delta]) -> None:
        """A begin tag was found. The white space before it is kept with the call, in case the call turns out to be text."""
        stripped = before.rstrip(_SPACE)
        self._emit(stripped, out)
        self._raw = before[len(stripped) :] + self._begin
        self._body = CallBody(self._calls, self._names, self._arguments_key, self._call_id)

    def _feed_call(self, body: CallBody, text: str, out: list[Delta]) -> str:
        at = body.feed(text, 0, out)
        if body.failed and not body.started:
            raw = self._raw + text
            self._body, self._raw = None, ""
            return self._as_text(raw, out)
        if body.started:
            self._raw = ""
        else:
            self._raw += text[:at]
        if body.failed:
            out.append(ToolCallEnd(self._calls, complete=False))
            self._calls += 1
            self._body = None
            if not self._parallel:
                self._names = frozenset()
        elif body.done:
            self._calls += 1
            self._body, self._expects_end, self._after_call = None, True, True
            self._had_last_call = not self._parallel
        return text[at:]

    def _as_text(self, raw: str, out: list[Delta]) -> str:
        """Gives back a tag that begins no call; what follows it is read again. Returns what is to be read."""
        tag_end = raw.index(self._begin) + len(self._begin)
        self._emit(raw[:tag_end], out)
        return raw[tag_end:]

    def _feed_end_tag(self, text: str) -> str:
        """Skips white space and the end tag behind a call's object. Anything else is left to be read as text."""
        text = self._held + text
        self._held = ""
        rest = text.lstrip(_SPACE)
        if rest.startswith(self._end):
            self._expects_end = False
            return rest[len(self._end) :]
        if self._end.startswith(rest):
            self._held = rest
            return ""
        self._expects_end = False
        return rest


def _kept(text: str, tag: str) -> int:
    """How much of the text is certain not to belong to a tag or the white space before one."""
    size = len(text)
    for length in range(min(len(tag) - 1, size), 0, -1):
        if text.endswith(tag[:length]):
            size -= length
            break
    return len(text[:size].rstrip(_SPACE))
