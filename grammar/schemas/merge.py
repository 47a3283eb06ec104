"""One schema that means two at once: how constraints beside anyOf, oneOf, allOf and $ref reach the branches.

XGrammar 0.2.9 ignores everything that stands beside these keywords; JSON Schema asks for both.
"""

from __future__ import annotations

from typing import Any

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
_SUBSCHEMAS = frozenset(("items", "additionalItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems"))


def merge(first: Schema, second: Schema) -> Schema:
    """A schema that allows what both allow. False when they exclude each other.

    Where one keyword cannot hold both (two patterns, two anyOf), the first one's stays: the result may then allow more.
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
    if "type" in first and "type" in second:
        types = _common_types(first["type"], second["type"])
        if not types:
            return False
        merged["type"] = types[0] if len(types) == 1 else types
    if not _merge_values(merged, first, second):
        return False
    _merge_required(merged, first, second)
    return merged if _merge_properties(merged, first, second) else False


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
        return bool(first["const"] == second["const"])
    allowed = [schema["enum"] for schema in (first, second) if isinstance(schema.get("enum"), list)]
    if "const" in merged:
        if any(merged["const"] not in values for values in allowed):
            return False
        merged.pop("enum", None)
    elif len(allowed) == 2:
        merged["enum"] = [value for value in allowed[0] if value in allowed[1]]
        return bool(merged["enum"])
    return True


def _merge_required(merged: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    left, right = first.get("required"), second.get("required")
    if isinstance(left, list) and isinstance(right, list):
        merged["required"] = [*left, *(name for name in right if name not in left)]


def _merge_properties(merged: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Unites properties; what one side closes to the other's properties stays closed. False when a required one is out."""
    sides = [side.get("properties") for side in (first, second)]
    properties = [side if isinstance(side, dict) else {} for side in sides]
    if any(side is not None for side in sides):
        united = dict(properties[0])
        for name, schema in properties[1].items():
            united[name] = both(united[name], schema) if name in united else schema
        for side, own in ((first, properties[0]), (second, properties[1])):
            if side.get("additionalProperties") is False and "patternProperties" not in side:
                united = {name: schema for name, schema in united.items() if name in own}
        merged["properties"] = united
    if "additionalProperties" in first and "additionalProperties" in second:
        rest = (first["additionalProperties"], second["additionalProperties"])
        merged["additionalProperties"] = False if False in rest else both(*rest)
    if merged.get("additionalProperties") is False and "patternProperties" not in merged:
        required = merged.get("required")
        known = merged.get("properties")
        if isinstance(required, list) and not set(required) <= set(known if isinstance(known, dict) else ()):
            return False
    return True
