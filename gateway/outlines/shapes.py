"""Messages as templates get them, taken apart: their shape, and the texts in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.outlines.holes import Opaque, Trace

Shape = tuple[Any, ...]
"""Keys in their order, roles and other fixed values; hashable."""

_TEXT, _VALUE = 0, 1  # in a shape, in place of a text and of the arguments of a call
_FIXED = frozenset((bool, int, float, type(None)))


_PLAIN = ("role", "content")
_PLAIN_SHAPES: Mapping[str, Shape] = {role: ("role", role, "content", _TEXT) for role in ("system", "user", "assistant")}


class UnfitError(Exception):
    """A message that has more in it than texts and calls."""


def take_apart(message: Mapping[str, Any], values: list[Any]) -> Shape:
    """The shape of a message; its texts are put behind `values`. Raises UnfitError."""
    shape: list[Any] = []
    for key, value in message.items():
        shape.append(key)
        if key == "role":
            shape.append(value)
        elif type(value) is str:
            shape.append(_TEXT)
            values.append(value)
        elif key == "tool_calls" and type(value) is list:
            shape.append(tuple([_call(call, values) for call in value]))
        else:
            shape.append(_fixed(value))
    return tuple(shape)


def put_together(shape: Shape, trace: Trace, numbers: Iterator[int]) -> dict[str, Any]:
    """A message of this shape with holes for its texts, the next ones of `numbers`."""
    message: dict[str, Any] = {}
    pairs = iter(shape)
    for key, value in zip(pairs, pairs, strict=True):
        if key == "role":
            message[key] = value
        elif key == "tool_calls" and type(value) is tuple and value[:1] != ("fixed",):
            message[key] = [put_together_call(call, trace, numbers) for call in value]
        else:
            message[key] = _value(value, trace, numbers)
    return message


def put_together_call(shape: Shape, trace: Trace, numbers: Iterator[int]) -> dict[str, Any]:
    """The same for a call."""
    call: dict[str, Any] = {}
    pairs = iter(shape)
    for key, value in zip(pairs, pairs, strict=True):
        inner = key == "function" and type(value) is tuple and value[:1] != ("fixed",)
        call[key] = put_together_call(value, trace, numbers) if inner else _value(value, trace, numbers)
    return call


def _call(call: Mapping[str, Any], values: list[Any]) -> Shape:
    shape: list[Any] = []
    for key, value in call.items():
        shape.append(key)
        if key == "function" and type(value) is dict:
            shape.append(_call(value, values))
        elif key == "type" and type(value) is str:
            shape.append(("fixed", "str", value))
        elif type(value) is str:
            shape.append(_TEXT)
            values.append(value)
        elif key == "arguments" and type(value) is dict:
            shape.append(_VALUE)
            values.append(value)
        else:
            shape.append(_fixed(value))
    return tuple(shape)


def _fixed(value: Any) -> tuple[str, str, Any]:
    if type(value) not in _FIXED:
        raise UnfitError(f"a {type(value).__name__}")
    # 1, 1.0 and True are equal, and print differently.
    return ("fixed", type(value).__name__, value)


def _value(shape: Any, trace: Trace, numbers: Iterator[int]) -> Any:
    if type(shape) is tuple:
        return shape[-1]
    hole: Opaque = trace.hole(next(numbers), is_text=shape == _TEXT)
    return hole


def plain_apart(messages: Sequence[Mapping[str, Any]], values: list[Any]) -> tuple[Shape, ...] | None:
    """The same for messages that are a role and a text and nothing else, which every template gets as they are; None, and
    `values` as they were, where not all of them are."""
    shapes: list[Shape] = []
    texts: list[str] = []
    for message in messages:
        shape = _PLAIN_SHAPES.get(message["role"])
        if shape is None or tuple(message) != _PLAIN or type(message["content"]) is not str:
            return None
        shapes.append(shape)
        texts.append(message["content"])
    values += texts
    return tuple(shapes)


def all_apart(messages: Sequence[Mapping[str, Any]], values: list[Any]) -> tuple[Shape, ...]:
    """As `take_apart`, of several messages."""
    return tuple([take_apart(message, values) for message in messages])
