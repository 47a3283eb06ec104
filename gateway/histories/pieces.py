"""The text of a turn, in pieces: what the template writes for some messages, given those before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.histories.skeleton import STAND_IN, skeleton
from gateway.rendering import ChatRenderer
from gateway.turn import TurnError
from grammar.tools import Tool

Messages = Sequence[Mapping[str, Any]]


class PieceRenderer:
    """Renders parts of one conversation. `tools` and `kwargs` are those of its turn."""

    def __init__(self, renderer: ChatRenderer, tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> None:
        self._renderer = renderer
        self._tools = tools
        self._stand_ins = (STAND_IN,) if tools else ()
        self._kwargs = kwargs
        self._head: tuple[list[dict[str, Any]], str] | None = None

    def whole(self, messages: Messages, *, prompt: bool = True) -> str:
        """All of it; with the generation prompt if `prompt`. Raises TurnError."""
        return self._renderer.render(messages, self._tools, template_kwargs=self._kwargs, add_generation_prompt=prompt)

    def part(self, messages: Messages, start: int, end: int, *, prompt: bool = False) -> str | None:
        """What `messages[start:end]` add to the text, with the generation prompt after them if `prompt`. None where that
        cannot be said: the template refuses the parts, or writes the earlier ones in another way."""
        try:
            if start == 0:
                return self.whole(messages[:end], prompt=prompt)
            head, before = self._before(messages, start)
            after = self._render([*head, *messages[start:end]], prompt=prompt)
        except TurnError:
            return None
        if not after.startswith(before) or STAND_IN.name in after[len(before) :]:
            return None
        return after[len(before) :]

    def opening(self, messages: Messages) -> str:
        """The generation prompt after `messages`; "" where there is none or it cannot be said."""
        try:
            head = skeleton(messages, len(messages))
            before, after = self._render(head, prompt=False), self._render(head, prompt=True)
        except TurnError:
            return ""
        return after[len(before) :] if after.startswith(before) else ""

    def _before(self, messages: Messages, start: int) -> tuple[list[dict[str, Any]], str]:
        """The skeleton of `messages[:start]` and its text; the last one is remembered, as parts are asked for twice."""
        head = skeleton(messages, start)
        if self._head is None or self._head[0] != head:
            self._head = (head, self._render(head, prompt=False))
        return self._head

    def _render(self, messages: Messages, *, prompt: bool) -> str:
        return self._renderer.render(messages, self._stand_ins, template_kwargs=self._kwargs, add_generation_prompt=prompt)
