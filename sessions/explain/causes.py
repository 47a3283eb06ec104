"""The first difference of two conversations, and its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from sessions.digests import split_reasoning
from sessions.explain.conversation import Conversation
from sessions.explain.texts import common_prefix, excerpt
from sessions.explain.volatile import volatile_kind

Cause = Literal[
    "system_changed",
    "timestamp",
    "uuid",
    "counter",
    "tools_added",
    "tools_removed",
    "tools_reordered",
    "tools_changed",
    "settings_changed",
    "arguments_reserialised",
    "reasoning_dropped",
    "history_edited",
    "compacted",
    "truncated",
    "template",
    "evicted",
    "other_replica",
    "unknown",
]
"""`template`: messages are the same and the template writes them otherwise. `truncated`: the conversation ends earlier.
`evicted`, `other_replica`: the prompt continues its predecessor's, and the replica had not (or never had) the blocks.
`unknown`: the text of the predecessor is not known here (any more)."""

VOLATILE: frozenset[Cause] = frozenset({"timestamp", "uuid", "counter"})

_COMPACTED_SHARE = 0.6
_REASONING_KEYS = ("reasoning_content", "reasoning")
_IGNORED_KEYS = frozenset({*_REASONING_KEYS, "refusal", "annotations", "audio", "function_call"})


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two conversations part. `path`: JSON path in the request; `message`: index, None for tools and settings.
    `offset`: UTF-8 bytes from the beginning of the value at `path`. `old`, `new`: excerpts around it, "" for a value
    that is not there."""

    cause: Cause
    path: str
    message: int | None
    offset: int
    old: str
    new: str


def first_difference(old: Conversation, new: Conversation) -> Difference | None:
    """Where `new` stops being a continuation of `old`: None when it is one, to the last message of `old`.

    Tools and settings come first, as they shape a prompt from its beginning on. Messages that mean the same in every way
    that a ledger forgives (white space at the end of an answer, fields that are null) are the same.
    """
    return _tools(old.tools, new.tools) or _settings(old.settings, new.settings) or _messages(old, new)


def _tools(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Difference | None:
    if list(old) == list(new) and _dumped(old) == _dumped(new):
        return None
    before, after = [_name(tool) for tool in old], [_name(tool) for tool in new]
    at = next((i for i, pair in enumerate(zip(old, new, strict=False)) if _dumped(pair[0]) != _dumped(pair[1])), None)
    if before == after and at is not None:
        path, offset, left, right = _value_difference(f"tools[{at}]", old[at], new[at])
        kind = volatile_kind(_dumped(old[at]), _dumped(new[at]))
        return Difference(kind or "tools_changed", path, None, offset, left, right)
    first = at if at is not None else min(len(old), len(new))
    gone, come = set(before) - set(after), set(after) - set(before)
    cause: Cause = "tools_reordered"
    if gone:
        cause = "tools_removed"
    elif come or len(before) < len(after):
        cause = "tools_added"
    elif len(before) > len(after):
        cause = "tools_removed"
    return Difference(cause, f"tools[{first}]", None, 0, _listed(before, first), _listed(after, first))


def _settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference | None:
    for name in sorted(old.keys() | new.keys()):
        one, other = old.get(name), new.get(name)
        if one != other:
            path, offset, left, right = _value_difference(name, one, other)
            kind = volatile_kind(_dumped(one), _dumped(other)) if isinstance(one, str) and isinstance(other, str) else None
            return Difference(kind or "settings_changed", path, None, offset, left, right)
    return None


def _messages(old: Conversation, new: Conversation) -> Difference | None:
    before, after = old.messages, new.messages
    for at, (one, other) in enumerate(zip(before, after, strict=False)):
        if not _same(one, other):
            return _message_difference(old, new, at)
    if len(after) >= len(before):
        return None
    at = len(after)
    return Difference("truncated", f"messages[{at}]", at, 0, excerpt(_text_of(before[at]), 0), "")


def _message_difference(old: Conversation, new: Conversation, at: int) -> Difference:
    one, other = old.messages[at], new.messages[at]
    path, offset, left, right = _value_difference(f"messages[{at}]", _plain(one), _plain(other))
    return Difference(_message_cause(old, new, at), path, at, offset, left, right)


def _message_cause(old: Conversation, new: Conversation, at: int) -> Cause:
    one, other = old.messages[at], new.messages[at]
    role = one.get("role")
    if role == other.get("role"):
        if role == "assistant":
            special = _answer_cause(one, other)
            if special is not None:
                return special
        kind = volatile_kind(_dumped(_plain(one)), _dumped(_plain(other)))
        if kind is not None:
            return kind
        if role in ("system", "developer") and not _is_compaction(old, new, at):
            return "system_changed"
    return "compacted" if _is_compaction(old, new, at) else "history_edited"


def _answer_cause(one: Mapping[str, Any], other: Mapping[str, Any]) -> Cause | None:
    said, thought = _said(one)
    said_now, thought_now = _said(other)
    calls, calls_now = _calls(one), _calls(other)
    if said == said_now and calls == calls_now:
        if thought and not thought_now:
            return "reasoning_dropped"
        if _dumped(one.get("tool_calls")) != _dumped(other.get("tool_calls")):
            return "arguments_reserialised"
    return None


def _is_compaction(old: Conversation, new: Conversation, at: int) -> bool:
    """The history from `at` on was made shorter: summed up, or its oldest messages dropped and later ones kept."""
    if len(new.messages) < len(old.messages):
        later = {_dumped(_plain(message)) for message in old.messages[at + 1 :]}
        if any(_dumped(_plain(message)) in later for message in new.messages[at : at + 4]):
            return True
    return new.text_size < _COMPACTED_SHARE * old.text_size


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one == other and _dumped(one) == _dumped(other):
        return True
    plain, plain_now = _plain(one), _plain(other)
    if one.get("role") == other.get("role") == "assistant":
        plain = {**plain, "content": (plain.get("content") or "").rstrip()} if _is_text(plain) else plain
        plain_now = {**plain_now, "content": (plain_now.get("content") or "").rstrip()} if _is_text(plain_now) else plain_now
    return _dumped(plain) == _dumped(plain_now)


def _is_text(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), str | None)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null, empty or says nothing to a template."""
    return {
        key: value
        for key, value in message.items()
        if value is not None and value != [] and not (key in _IGNORED_KEYS and key not in _REASONING_KEYS)
    }


def _said(message: Mapping[str, Any]) -> tuple[str, str]:
    """(content without reasoning, reasoning)."""
    content = message.get("content")
    thought, said = split_reasoning(content if isinstance(content, str) else "")
    for key in _REASONING_KEYS:
        value = message.get(key)
        if isinstance(value, str) and value:
            thought = value
    return said.strip(), thought.strip()


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = orjson.loads(arguments)
                except orjson.JSONDecodeError:
                    pass
            calls.append([function.get("name"), arguments])
    return calls


def _value_difference(path: str, old: Any, new: Any) -> tuple[str, int, str, str]:
    """(path of the first value that differs, bytes into it, excerpts of both)."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        # In the order of the old one, as that is the order of its text; then what is new.
        for key in (*old, *(key for key in new if key not in old)):
            if key not in old or key not in new or _dumped(old[key]) != _dumped(new[key]):
                return _value_difference(f"{path}.{key}", old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list):
        for at, (one, other) in enumerate(zip(old, new, strict=False)):
            if _dumped(one) != _dumped(other):
                return _value_difference(f"{path}[{at}]", one, other)
        at = min(len(old), len(new))
        if at < max(len(old), len(new)):
            left, right = (_shown(old[at]) if at < len(old) else ""), (_shown(new[at]) if at < len(new) else "")
            return f"{path}[{at}]", 0, excerpt(left, 0), excerpt(right, 0)
    left, right = _shown(old), _shown(new)
    at = common_prefix(left, right)
    return path, len(left[:at].encode("utf-8", "surrogatepass")), excerpt(left, at), excerpt(right, at)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _dumped(value)


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) and content else _dumped(_plain(message))


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name"))


def _listed(names: Sequence[str], at: int) -> str:
    return excerpt(", ".join(names[at : at + 8]), 0)


def _dumped(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except (orjson.JSONEncodeError, RecursionError):
        return repr(value)
