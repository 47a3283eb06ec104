"""A schema without a part that was found to violate it: what a second try of a call is written by.

The part is the property that holds what a JSON pointer names. Where the property may be left out it is; where it is required,
the value that was written is ruled out instead, as far as a grammar can say so.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from typing import Any

_MAX_TEXT = 64
"""Longer strings are not ruled out: the pattern of all others grows with their length."""
_MAX_STEPS = 64


def without_part(schema: Any, pointer: str, arguments: str) -> dict[str, Any] | None:
    """The schema without the part of the arguments (JSON text) that the pointer names; None where no part can be left out."""
    root = copy.deepcopy(schema)
    value = json.loads(arguments)
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    if not isinstance(root, dict):
        return None
    holder = _holder(root, parts, value)
    if holder is None:
        return None
    node, name, written = holder
    if name not in node.get("required", ()):
        del node["properties"][name]
        if node.get("additionalProperties", False) is not False:
            node["additionalProperties"] = False  # else it could be written all the same
        return root
    other = _without_value(node["properties"][name], written)
    if other is None:
        return None
    node["properties"][name] = other
    return root


def _holder(root: dict[str, Any], parts: Sequence[str], value: Any) -> tuple[dict[str, Any], str, Any] | None:
    """(the schema of an object, the property in it, what stands there) for the innermost property on the way."""
    found = None
    node: Any = _entered(root, root)
    for part in parts:
        properties = node.get("properties") if isinstance(node, dict) else None
        if not isinstance(value, dict) or not isinstance(properties, dict) or part not in properties or part not in value:
            break
        value = value[part]
        found = node, part, value
        properties[part] = _entered(properties[part], root)
        node = properties[part]
    return found


def _entered(schema: Any, root: dict[str, Any]) -> Any:
    """A subschema with a local reference replaced by a copy of what it names: other uses of that stay as they are."""
    for _ in range(_MAX_STEPS):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#/")):
            break
        target: Any = root
        for part in schema["$ref"][2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        rest = {key: child for key, child in schema.items() if key != "$ref"}
        if schema is root:
            schema.clear()
            schema.update(copy.deepcopy(target), **rest)
        else:
            schema = {**copy.deepcopy(target), **rest}
    return schema


def _without_value(schema: Any, value: Any) -> dict[str, Any] | None:
    if not isinstance(schema, dict) or "const" in schema:
        return None
    values = schema.get("enum")
    if isinstance(values, list):
        others = [other for other in values if json.dumps(other) != json.dumps(value)]
        return {**schema, "enum": others} if others else None
    if isinstance(value, bool):
        return {**schema, "enum": [not value]}
    if isinstance(value, int) and "anyOf" not in schema:
        sides = _sides(schema, value)
        return {**schema, "anyOf": sides} if sides else None
    if isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and "\n" not in value:
        return {**schema, "pattern": _any_but(value)}
    return None


def _sides(schema: dict[str, Any], value: int) -> list[dict[str, Any]]:
    """What of the schema's range is below the value, and what above; a side that holds nothing would be refused."""
    low, above = schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf)
    high, below = schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf)
    if isinstance(above, bool):  # draft 4
        above = low if above else -math.inf
    if isinstance(below, bool):
        below = high if below else math.inf
    sides: list[dict[str, Any]] = []
    if low <= value - 1 and above < value - 1:
        sides.append({"maximum": value - 1})
    if high >= value + 1 and below > value + 1:
        sides.append({"minimum": value + 1})
    return sides


def _any_but(text: str) -> str:
    """A pattern of all strings of one line but this one."""
    ways = [""]
    for position, char in enumerate(text):
        begun = re.escape(text[:position])
        ways.append(f"{begun}[^{re.escape(char)}].*")
        if position:
            ways.append(begun)
    ways.append(f"{re.escape(text)}.+")
    return f"^({'|'.join(ways)})$"
