"""Names of messages: 128-bit digests that are compared in place of the messages themselves.

There are two. The *exact* digest is of every byte that a chat template can see: equal digests render to equal text in the same
place. The *meaning* is of what an assistant message says: clients re-serialise the arguments of calls, trim white space
and drop reasoning, and the message still means what the model generated.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import xxhash

DIGEST_BYTES = 16
NO_MEANING = bytes(DIGEST_BYTES)
"""Stands where a message was not generated here."""

_EXACT = 2**53


def message_digest(message: Mapping[str, Any]) -> bytes:
    """The exact digest of a normalised message (gateway.turn.Turn). Keys count in their order, as templates print them so.

    What cannot be written as JSON gets a digest that nothing is equal to.
    """
    return xxhash.xxh3_128_digest(_json(message))


def message_digests(messages: Iterable[Mapping[str, Any]]) -> bytes:
    """Exact digests of messages, joined: `DIGEST_BYTES` each."""
    dumps, digest = orjson.dumps, xxhash.xxh3_128_digest
    try:
        return b"".join([digest(dumps(message)) for message in messages])
    except orjson.JSONEncodeError:
        return b"".join([message_digest(message) for message in messages])


def meaning_digest(message: Mapping[str, Any]) -> bytes:
    """What an assistant message says: its content without reasoning and outer white space, and its calls by name and
    arguments, compared as JSON values (1 and 1.0 are one number, the order of keys does not count). Ids of calls, which
    the gateway makes up, and everything else do not count."""
    content = message.get("content") or ""
    said = split_reasoning(content if isinstance(content, str) else "")[1].strip()
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append([function.get("name"), _value(function.get("arguments"))])
    return xxhash.xxh3_128_digest(_json([said, calls], orjson.OPT_SORT_KEYS))


def context_digest(*parts: Any) -> bytes:
    """One digest of all that shapes a prompt beside its messages: model, tools, template variables. `parts`: JSON values and
    dataclasses."""
    return xxhash.xxh3_128_digest(_json(parts))


def prefix_names(digests: bytes, scope: bytes = b"") -> list[bytes]:
    """A name for every prefix of a conversation, shortest first: by it a request without a session finds the ledger that it
    extends. `digests`: of its messages, joined; `scope`: what else must agree."""
    names = []
    hasher = xxhash.xxh3_128(scope)
    for start in range(0, len(digests), DIGEST_BYTES):
        hasher.update(digests[start : start + DIGEST_BYTES])
        names.append(hasher.digest())
    return names


def prefix_name(digests: bytes, scope: bytes = b"") -> bytes:
    """The last of `prefix_names`."""
    return xxhash.xxh3_128_digest(scope + digests)


def split_reasoning(text: str, begin: str = "<think>", end: str = "</think>") -> tuple[str, str]:
    """(reasoning with its tags and the white space after it, the rest). The begin tag may stand in the prompt instead."""
    head, found, rest = text.partition(end)
    if not found or (begin in head and not head.lstrip().startswith(begin)):
        return "", text
    answer = rest.lstrip()
    return text[: len(text) - len(answer)], answer


def _value(value: Any) -> Any:
    """JSON values that are equal as values, made equal as text."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_value(inner) for inner in value]
    return value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _json(value: Any, option: int | None = None) -> bytes:
    try:
        return orjson.dumps(value, option=option)
    except orjson.JSONEncodeError:
        # Integers beyond 64 bits, half surrogate pairs, deep nesting.
        try:
            return json.dumps(value, sort_keys=option == orjson.OPT_SORT_KEYS, default=_plain).encode()
        except (TypeError, ValueError, RecursionError):
            return os.urandom(DIGEST_BYTES)
