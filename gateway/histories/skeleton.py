"""A few short messages in place of a long history.

What a chat template writes for new messages depends on little of what came before: whether there was a system message and a
user's, which role spoke last, and whether the last call was answered. So the new messages are rendered behind a skeleton of the
history, and what the skeleton alone renders to is taken away. For which templates and turns the rest is what the whole history
would have given is not assumed but found out (stability.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grammar.tools import Tool

STAND_IN = Tool("zq7standin", "zq7standin", {"type": "object", "properties": {}})
"""In place of the tools of a turn: they are written before the new messages, or the text cannot be cut there."""

_KEPT = 24
_MAX_LOOK = 4096
_DROPPED = ("reasoning_content", "tool_calls")


def skeleton(messages: Sequence[Mapping[str, Any]], end: int) -> list[Mapping[str, Any]]:
    """At most five short messages in place of `messages[:end]`: the system's, the last of a user, and the last one, with the
    call that it answers. Roles, names, ids and the ends of long contents stay."""
    if end == 0:
        return []
    kept = {end - 1}
    if messages[0]["role"] in ("system", "developer"):
        kept.add(0)
    at = end - 1
    while at > 0 and messages[at]["role"] == "tool":
        at -= 1
    kept.add(at)
    for position in range(at, max(at - _MAX_LOOK, -1), -1):
        if messages[position]["role"] == "user":
            kept.add(position)
            break
    return [_short(messages[position]) for position in sorted(kept)]


def _short(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not (isinstance(content, str) and len(content) > 3 * _KEPT) and message.keys().isdisjoint(_DROPPED):
        return message
    short = {key: value for key, value in message.items() if key not in _DROPPED}
    if isinstance(content, str) and len(content) > 3 * _KEPT:
        short["content"] = content[:_KEPT] + content[-_KEPT:]
    calls = message.get("tool_calls")
    if calls:
        call = calls[0]
        short["tool_calls"] = [{**call, "function": {**call["function"], "arguments": {}}}]
    return short
