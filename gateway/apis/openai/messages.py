"""OpenAI messages to the form a Turn carries: one string of content, tool call arguments as objects, nothing null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.apis.openai.sampling import bad_field
from grammar.arguments import arguments_object
from sessions.nonces import without_nonces

ROLES = ("system", "developer", "user", "assistant", "tool")

_PLAIN = ("user", "assistant")
_MEDIA = {
    "image_url": "an image",
    "image": "an image",
    "input_image": "an image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "a video",
    "file": "a file",
    "input_file": "a file",
}


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments` is JSON text by the book; clients also send objects, "", null and broken text."""

    name: str
    arguments: Any = None


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call the model made in an earlier turn."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class Message(msgspec.Struct, frozen=True):
    """One message of a body. Fields not named here have no effect on the prompt."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None


def normalise(messages: list[Message], warnings: list[str], *, start: int = 0) -> tuple[Mapping[str, Any], ...]:
    """Messages as `gateway.turn.Turn` wants them. Adds to `warnings` what was left out. `start`: how many come before them.
    Raises TurnError 400."""
    if not messages and not start:
        raise bad_field("messages", "at least one message is needed")
    return tuple([_message(message, position, warnings) for position, message in enumerate(messages, start)])


def _message(message: Message, position: int, warnings: list[str]) -> dict[str, Any]:
    role, content = message.role, message.content
    if role in _PLAIN and type(content) is str and content and not message.name and not message.tool_calls:
        # Nine messages of ten; a conversation has hundreds.
        if role == "user":
            return {"role": "user", "content": content}
        if role == "assistant" and not message.reasoning_content and not message.reasoning:
            return {"role": "assistant", "content": content}
    where = f"messages[{position}]"
    if role not in ROLES:
        raise bad_field(f"{where}.role", f"{message.role[:40]!r} is not a role; use one of {', '.join(ROLES)}")
    content = _text(message.content, f"{where}.content", warnings)
    if message.role in ("system", "developer"):
        kept = without_nonces(content)
        if kept != content:
            warnings.append(f"left out of {where}.content: a billing header that changes with every request")
            content = kept
    if not content and message.refusal:
        content = message.refusal
    normal: dict[str, Any] = {"role": message.role}
    calls = _calls(message, where, warnings) if message.role == "assistant" and message.tool_calls else []
    if content or not calls:
        normal["content"] = content
    if calls:
        normal["tool_calls"] = calls
    if message.name:
        normal["name"] = message.name
    if message.role == "tool" and message.tool_call_id:
        normal["tool_call_id"] = message.tool_call_id
    if message.role == "assistant":
        reasoning = message.reasoning_content or (message.reasoning if isinstance(message.reasoning, str) else None)
        if reasoning:
            normal["reasoning_content"] = reasoning
    return normal


def _text(content: str | list[Any] | None, where: str, warnings: list[str]) -> str:
    """null, "" and absent are the same; text parts are joined by newlines, as vLLM does for templates that take strings."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for position, part in enumerate(content):
        at = f"{where}[{position}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise bad_field(at, "a content part must be an object with a type")
        kind = part.get("type")
        if isinstance(kind, str) and kind in _MEDIA:
            raise bad_field(at, f"this part is {_MEDIA[kind]}, and the model reads text only; leave it out")
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if kind in ("text", "input_text", "output_text", "refusal"):
            if not isinstance(text, str):
                raise bad_field(f"{at}.{'refusal' if kind == 'refusal' else 'text'}", "a string is expected")
            texts.append(text)
        else:
            warnings.append(f"skipped {at}: unknown content type {str(kind)[:40]!r}")
    return "\n".join(texts)


def _calls(message: Message, where: str, warnings: list[str]) -> list[dict[str, Any]]:
    calls = []
    for position, call in enumerate(message.tool_calls or ()):
        at = f"{where}.tool_calls[{position}]"
        if call.function is None:
            if call.type in (None, "function"):
                raise bad_field(f"{at}.function", "the call's name and arguments are missing")
            warnings.append(f"skipped {at}: unknown kind {call.type[:40]!r}")
            continue
        normal: dict[str, Any] = {"type": "function"}
        if call.id:
            normal["id"] = call.id
        normal["function"] = {"name": call.function.name, "arguments": arguments_object(call.function.arguments)}
        calls.append(normal)
    return calls
