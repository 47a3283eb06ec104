"""Whether and how an answer begins with reasoning: read from what the chat template writes at the end of a prompt."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from gateway.rendering import ChatRenderer
from gateway.turn import TurnError
from grammar.thinking import Thinking, ThinkingTags
from grammar.tools import Tool

_REMEMBERED = 256
_TOOL = Tool("zq7tool", "zq7tool", {"type": "object", "properties": {}})
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "zq7tool", "arguments": {}}}
_USER = {"role": "user", "content": "a"}


class BudgetFor(Protocol):
    """Tokens of reasoning that a request allows."""

    def __call__(self, *, template_takes_effort: bool) -> int | None: ...


class ThinkingReader:
    """Of one model. `tags` None: its template knows no reasoning, or its way are channels. Thread-safe."""

    def __init__(self, renderer: ChatRenderer, tags: ThinkingTags | None, *, takes_effort: bool, channels: bool) -> None:
        self._renderer = renderer
        self._tags = tags
        self._takes_effort = takes_effort
        self._channels = channels
        self._known: OrderedDict[bytes, Literal["open", "possible", "closed"]] = OrderedDict()
        self._lock = threading.Lock()

    def of(
        self, messages: Sequence[Mapping[str, Any]], with_tools: bool, kwargs: Mapping[str, Any], budget_for: BudgetFor
    ) -> Thinking | None:
        """The reasoning of a turn; None where there is none to expect or to bound."""
        budget = budget_for(template_takes_effort=self._takes_effort)
        if self._channels:
            return Thinking("possible", None, budget) if budget is not None else None
        if self._tags is None or not messages or not self._renderer.has_template:
            return None
        state = self._state(str(messages[-1].get("role")), with_tools, kwargs)
        return None if state == "closed" else Thinking(state, self._tags, budget)

    def _state(self, role: str, with_tools: bool, kwargs: Mapping[str, Any]) -> Literal["open", "possible", "closed"]:
        try:
            key = msgspec.msgpack.encode((role == "tool", with_tools, kwargs), order="sorted")
        except (TypeError, ValueError, RecursionError):
            return self._look(role, with_tools, kwargs)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        state = self._look(role, with_tools, kwargs)
        if len(key) <= 4096:
            with self._lock:
                self._known[key] = state
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        return state

    def _look(self, role: str, with_tools: bool, kwargs: Mapping[str, Any]) -> Literal["open", "possible", "closed"]:
        messages: list[dict[str, Any]] = [_USER]
        if role == "tool":
            result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "zq7tool", "content": "b"}
            messages += [{"role": "assistant", "content": "", "tool_calls": [_CALL]}, result]
        try:
            text = self._renderer.render(messages, (_TOOL,) if with_tools else (), template_kwargs=kwargs).rstrip()
        except TurnError:
            return "possible"  # the turn itself will say what is wrong
        if self._tags is not None and text.endswith(self._tags.begin):
            return "open"
        return "closed" if self._tags is not None and text.endswith(self._tags.end) else "possible"


def exempt_while(thinking: Thinking | None) -> tuple[tuple[str, str], ...]:
    """The region in which stop strings do not fire."""
    return () if thinking is None or thinking.tags is None else ((thinking.tags.begin, thinking.tags.end),)


def shown_while(thinking: Thinking | None) -> tuple[str, ...]:
    """The special tokens that have to be seen as text."""
    if thinking is None or thinking.tags is None or not thinking.tags.special:
        return ()
    return thinking.tags.begin, thinking.tags.end
