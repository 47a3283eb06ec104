"""One schema that means two at once: how constraints beside anyOf, oneOf, allOf and $ref reach the branches.

XGrammar 0.2.9 ignores everything that stands beside these keywords; JSON Schema asks for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

Schema = dict[str, Any] | bool

ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "id", "$comment", "$anchor", "$dynamicAnchor", "$vocabulary", "$defs", "definitions"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    )
)
"""Keywords that say nothing about which values are valid."""
_LARGER = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"))
_SMALLER = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"))
_INTERSECTED = frozenset(("type", "enum", "const", "required", "properties", "additionalProperties"))
_SUBSCHEMAS = frozenset(("items", "additionalItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems"))


def merge(first: Schema, second: Schema, lost: Callable[[str], None] = lambda keyword: None) -> Schema:
    """A schema that allows what both allow. False when they exclude each other.

    Where one keyword cannot hold both (two patterns, two anyOf), the first one's stays: the result may then allow more, and
    `lost` is told the keyword.
    """
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    merged = dict(first)
    for key, value in second.items():
        if key not in merged or key in ANNOTATIONS:
            merged.setdefault(key, value)
        elif key in _LARGER and _is_number(value) and _is_number(merged[key]):
            merged[key] = max(merged[key], value)
        elif key in _SMALLER and _is_number(value) and _is_number(merged[key]):
            merged[key] = min(merged[key], value)
        elif key in _SUBSCHEMAS:
            merged[key] = both(merged[key], value)
        elif key == "patternProperties" and isinstance(value, dict) and isinstance(merged[key], dict):
            merged[key] = {
                **merged[key],
                **{name: both(merged[key][name], child) if name in merged[key] else child for name, child in value.items()},
            }
        elif key not in _INTERSECTED and merged[key] != value:
            lost(key)
    for one, other in ((first, second), (second, first)):
        # Items behind the fixed ones: which those are, the other side says.
        if _fixes_items(one) and not _fixes_items(other) and ("items" in other or "additionalItems" in other):
            lost("items")
    if "type" in first and "type" in second:
        types = _common_types(first["type"], second["type"])
        if not types:
            return False
        merged["type"] = types[0] if len(types) == 1 else types
    if not _merge_values(merged, first, second):
        return False
    _merge_required(merged, first, second)
    return merged if _merge_properties(merged, first, second) else False


def _fixes_items(schema: dict[str, Any]) -> bool:
    return "prefixItems" in schema or isinstance(schema.get("items"), list)


def both(first: Any, second: Any) -> Any:
    """A schema for a place where two apply."""
    return first if first == second else {"allOf": [first, second]}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _common_types(first: Any, second: Any) -> list[Any]:
    left = first if isinstance(first, list) else [first]
    right = second if isinstance(second, list) else [second]
    common = [name for name in left if name in right or (name == "integer" and "number" in right)]
    if "number" in left and "integer" in right and "integer" not in common:
        common.append("integer")
    return common


def _merge_values(merged: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Intersects const and enum. False when no value is left."""
    if "const" in first and "const" in second:
        return bool(_identity(first["const"]) == _identity(second["const"]))
    allowed = [schema["enum"] for schema in (first, second) if isinstance(schema.get("enum"), list)]
    if "const" in merged:
        if any(_identity(merged["const"]) not in set(map(_identity, values)) for values in allowed):
            return False
        merged.pop("enum", None)
    elif len(allowed) == 2:
        wanted = set(map(_identity, allowed[1]))
        merged["enum"] = [value for value in allowed[0] if _identity(value) in wanted]
        return bool(merged["enum"])
    return True


def _identity(value: Any) -> Any:
    """Hashable, and equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return msgspec.json.encode(value, order="sorted")
    return value


def _merge_required(merged: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    left, right = first.get("required"), second.get("required")
    if isinstance(left, list) and isinstance(right, list):
        names = {name for name in left if isinstance(name, str)}
        merged["required"] = [*left, *(name for name in right if not isinstance(name, str) or name not in names)]


def _merge_properties(merged: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Unites properties; what one side says of further properties holds for those that only the other side describes.
    False when a required one is out."""
    sides = [side.get("properties") for side in (first, second)]
    properties = [side if isinstance(side, dict) else {} for side in sides]
    if any(side is not None for side in sides):
        united = dict(properties[0])
        for name, schema in properties[1].items():
            united[name] = both(united[name], schema) if name in united else schema
        for side, own in ((first, properties[0]), (second, properties[1])):
            rest = side.get("additionalProperties", True)
            if rest is True or "patternProperties" in side:
                continue
            if rest is False:
                united = {name: schema for name, schema in united.items() if name in own}
            else:
                united = {name: schema if name in own else both(schema, rest) for name, schema in united.items()}
        merged["properties"] = united
    if "additionalProperties" in first and "additionalProperties" in second:
        left, right = first["additionalProperties"], second["additionalProperties"]
        merged["additionalProperties"] = False if left is False or right is False else both(left, right)
    if merged.get("additionalProperties") is False and "patternProperties" not in merged:
        required = merged.get("required")
        known = merged.get("properties")
        if isinstance(required, list) and (known is None or isinstance(known, dict)):
            return all(name in (known or ()) for name in required if isinstance(name, str))
    return True
