"""Whether at most one of several schemas can hold for any value, seen from their shapes alone."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import msgspec

_MAX_BRANCHES = 64


def exclusive(branches: list[Any]) -> bool:
    """True only where it is certain: different types, different fixed values, or a required property that tells them apart."""
    if len(branches) > _MAX_BRANCHES:
        return False
    return all(_apart(first, second) for first, second in combinations(branches, 2))


def _apart(first: Any, second: Any) -> bool:
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    left, right = _types(first), _types(second)
    if left is not None and right is not None and not left & right:
        return True
    one, other = _fixed(first), _fixed(second)
    if one is not None and other is not None and not one & other:
        return True
    for name in set(_required(first)) & set(_required(second)):
        mine, theirs = (schema.get("properties", {}) for schema in (first, second))
        described = isinstance(mine, dict) and isinstance(theirs, dict) and name in mine and name in theirs
        objects = first.get("type") == second.get("type") == "object"
        if described and objects and _apart(mine[name], theirs[name]):
            return True
    return False


def _types(schema: dict[str, Any]) -> set[str] | None:
    value = schema.get("type")
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return set(names) | ({"integer"} if "number" in names else set())


def _fixed(schema: dict[str, Any]) -> set[bytes] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {msgspec.json.encode(float(value) if type(value) in (int, float) else value, order="sorted") for value in values}


def _required(schema: dict[str, Any]) -> list[str]:
    value = schema.get("required")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
