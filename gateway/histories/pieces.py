"""The text of a turn, in pieces: what the template writes for some messages, given those before them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from gateway.histories.skeleton import STAND_IN, skeleton
from gateway.outlines.outline import Head, Outlines
from gateway.rendering import ChatRenderer
from gateway.turn import TurnError
from grammar.tools import Tool

Messages = Sequence[Mapping[str, Any]]


class Before:
    """What stands in place of the messages before a part: their skeleton, with what is made of it when it is asked for."""

    __slots__ = ("apart", "skeleton", "text")

    def __init__(self, messages: list[Mapping[str, Any]], apart: Head | None) -> None:
        self.skeleton = messages
        self.apart = apart
        self.text: str | None = None


class PieceRenderer:
    """Renders parts of one conversation. `tools` and `kwargs` are those of its turn."""

    def __init__(
        self,
        renderer: ChatRenderer,
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any],
        outlines: Outlines | None = None,
        scope: Hashable = None,
    ) -> None:
        """`outlines`: None renders everything that is asked for. `scope`: stands for `kwargs`, and for all else that the texts
        depend on beside messages and tools."""
        self._renderer = renderer
        self._tools = tools
        self._stand_ins = (STAND_IN,) if tools else ()
        self._kwargs = kwargs
        self._outlines = outlines
        self._scope = scope

    def whole(self, messages: Messages, *, prompt: bool = True) -> str:
        """All of it; with the generation prompt if `prompt`. Raises TurnError."""
        return self._renderer.render(messages, self._tools, template_kwargs=self._kwargs, add_generation_prompt=prompt)

    def part(self, messages: Messages, start: int, end: int, *, prompt: bool = False) -> str | None:
        """What `messages[start:end]` add to the text, with the generation prompt after them if `prompt`. None where that
        cannot be said: the template refuses the parts, or writes the earlier ones in another way."""
        if start == 0:
            try:
                return self.whole(messages[:end], prompt=prompt)
            except TurnError:
                return None
        return self.behind(self.before(messages, start), messages[start:end], prompt=prompt)

    def before(self, messages: Messages, start: int) -> Before:
        """What stands for `messages[:start]`, of which there is at least one."""
        head = skeleton(messages, start)
        return Before(head, None if self._outlines is None else self._outlines.head(head, bool(self._tools)))

    def behind(self, before: Before, messages: Messages, *, prompt: bool = False) -> str | None:
        """As `part`, of `messages` behind those before them."""
        outlines, wanted = self._outlines, None
        if outlines is not None and before.apart is not None:
            wanted = outlines.wanted(before.apart, messages, bool(self._tools), self._scope, prompt=prompt)
        text = None if outlines is None or wanted is None else outlines.find(wanted)
        if text is None:
            text = self._rendered(before, messages, prompt)
            if outlines is not None and wanted is not None and text is not None:
                outlines.learn(wanted, bool(self._tools), self._kwargs, text)
        return None if text is None or STAND_IN.name in text else text

    def opening(self, messages: Messages) -> str:
        """The generation prompt after `messages`; "" where there is none or it cannot be said."""
        try:
            head = skeleton(messages, len(messages))
            before, after = self._render(head, prompt=False), self._render(head, prompt=True)
        except TurnError:
            return ""
        return after[len(before) :] if after.startswith(before) else ""

    def _rendered(self, before: Before, messages: Messages, prompt: bool) -> str | None:
        try:
            if before.text is None:
                before.text = self._render(before.skeleton, prompt=False)
            after = self._render([*before.skeleton, *messages], prompt=prompt)
        except TurnError:
            return None
        return after[len(before.text) :] if after.startswith(before.text) else None

    def _render(self, messages: Messages, *, prompt: bool) -> str:
        return self._renderer.render(messages, self._stand_ins, template_kwargs=self._kwargs, add_generation_prompt=prompt)
