"""The keywords of one schema that hold no subschemas, checked and normalised; subschemas go back to the walk."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from grammar.pattern import LOOKAHEAD, PatternRefused, can_be_checked, examine_pattern
from grammar.schemas.context import Context, Path, kind_of
from grammar.schemas.cost import distinct_prefixes
from grammar.schemas.merge import Schema

Visit = Callable[[Any, Path], Schema]

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_MEANT = {
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "tuple", "set"), "array"),
    **dict.fromkeys(("str", "text", "date"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("none", "None"), "null"),
}
_FAMILIES = {
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_INT64 = 2**63 - 1
_ANYTHING = ("^.*$", "^.*.*$", "^.*.*.*$")
_FORMATS = frozenset(
    (
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
        *("uri-template", "json-pointer", "relative-json-pointer"),
    )
)
"""The formats XGrammar 0.2.9 enforces."""


def types_of(schema: dict[str, Any], context: Context, path: Path) -> list[str]:
    """The types a schema allows; [] for any. Without `type` the families of its constraints are taken, so that each holds."""
    if "type" not in schema:
        families = [name for name, keys in _FAMILIES.items() if any(key in schema for key in keys)]
        return [] if "enum" in schema or "const" in schema else families
    value = schema["type"]
    names = value if isinstance(value, list) else [value]
    if not names:
        context.refuse("has an empty list of types", (*path, "type"))
    for name in names:
        if name not in TYPES:
            hint = f"; did you mean {_MEANT[name]!r}?" if isinstance(name, str) and name in _MEANT else ""
            known = ", ".join(TYPES)
            context.refuse(f"has type {name!r}, which is none of {known}{hint}", (*path, "type"))
    return list(dict.fromkeys(names))


def values(schema: dict[str, Any], types: list[str], context: Context, path: Path) -> dict[str, Any] | None:
    """`const` and `enum`, without the values whose type is not allowed. None when the schema has neither."""
    if "const" in schema:
        if types and not _has_type(schema["const"], types):
            context.refuse(f"has a const that is not of type {' or '.join(types)}", (*path, "const"))
        context.count_enum(1, path)
        return {"const": schema["const"]}
    if "enum" not in schema:
        return None
    enum = schema["enum"]
    if not isinstance(enum, list):
        context.refuse(f"has an enum that is {kind_of(enum)} instead of a list", (*path, "enum"))
    if not enum:
        context.refuse("has an empty enum, so no value fits", (*path, "enum"))
    context.count_enum(len(enum), (*path, "enum"))
    allowed = [value for value in enum if not types or _has_type(value, types)]
    if not allowed:
        context.refuse(f"has an enum without any value of type {' or '.join(types)}", (*path, "enum"))
    return {"enum": allowed}


def _has_type(value: object, types: list[str]) -> bool:
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and float(value).is_integer())
    if isinstance(value, str):
        return "string" in types
    return ("array" if isinstance(value, list) else "object") in types


def string(schema: dict[str, Any], context: Context, path: Path) -> dict[str, Any]:
    """Length limits, pattern or format: XGrammar enforces one of the three, the most telling one stays."""
    lengths = _counts(schema, "minLength", "maxLength", context, path)
    if lengths.get("maxLength", 0) > context.limits.max_counted_length:
        context.relax("maxLength", path)
        del lengths["maxLength"]
    if "pattern" in schema:
        text = checked_pattern(schema["pattern"], context, (*path, "pattern"), relaxable=True)
        if text is not None and text not in _ANYTHING:
            for beside in (*lengths, *(("format",) if schema.get("format") in _FORMATS else ())):
                context.relax(beside, path)
            return {"pattern": text}
    if schema.get("format") in _FORMATS:
        for beside in lengths:
            context.relax(beside, path)
        return {"format": schema["format"]}
    return lengths


def checked_pattern(value: object, context: Context, path: Path, *, relaxable: bool = False) -> str | None:
    """A pattern in the form XGrammar needs. `relaxable`: None, with a note, for one that it cannot hold but a validator can."""
    if not isinstance(value, str):
        context.refuse(f"has a pattern that is {kind_of(value)} instead of a string", path)
    why = ""
    info = None
    if len(value) > context.limits.max_pattern_length:
        why = f"has a pattern longer than {context.limits.max_pattern_length} characters"
    else:
        try:
            info = examine_pattern(value)
        except PatternRefused as refused:
            why = f"has the pattern {value[:80]!r}, which {refused.message}"
    if info is not None and info.size > context.limits.max_pattern_size:
        why = (
            f"has the pattern {value[:80]!r}, whose repetitions come to {info.size} steps; "
            f"at most {context.limits.max_pattern_size} are allowed, use minLength and maxLength for lengths"
        )
    if info is None or why:
        if not relaxable or not can_be_checked(value):
            context.refuse(why, path)
        context.relax(str(path[-1]), path[:-1])
        return None
    if relaxable and LOOKAHEAD.search(value):
        context.relax(str(path[-1]), path[:-1])
    return info.text


def number(schema: dict[str, Any], types: list[str], context: Context, path: Path) -> dict[str, Any]:
    """Bounds and multiples. Booleans in exclusive bounds (draft 4) move to the bound they mean."""
    schema = dict(schema)
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(exclusive), bool):
            if schema[exclusive] and bound in schema:
                schema[exclusive] = schema.pop(bound)
            else:
                del schema[exclusive]
    integral = "number" not in types
    out: dict[str, Any] = {}
    for key in _FAMILIES["number"]:
        if key not in schema:
            continue
        value = schema[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            context.refuse(f"has a {key} that is {kind_of(value)} instead of a finite number", (*path, key))
        out[key] = value
    multiple = out.get("multipleOf")
    if multiple is not None and multiple <= 0:
        context.refuse("has a multipleOf that is not above 0", (*path, "multipleOf"))
    if multiple is not None and (not integral or multiple != int(multiple)):
        context.relax("multipleOf", path)
        del out["multipleOf"]
    if integral:
        out = {key: _whole(key, value) for key, value in out.items()}
    low = max([out.get("minimum", -math.inf), _above(out.get("exclusiveMinimum"), integral)])
    high = min([out.get("maximum", math.inf), _below(out.get("exclusiveMaximum"), integral)])
    if low > high or (low == high and not integral and ("exclusiveMinimum" in out or "exclusiveMaximum" in out)):
        context.refuse("has a minimum above its maximum, so no number fits", path)
    for key, value in list(out.items()):
        # A bound that no number of 64 bits reaches says nothing of those; any other has to be checked.
        if key != "multipleOf" and abs(value) > _INT64:
            if (value > 0) == key.endswith("inimum"):
                context.relax(key, path)
            del out[key]
    return out


def _whole(key: str, value: float) -> int:
    """An integer bound that means the same for integers."""
    if key in ("minimum", "exclusiveMaximum"):
        return math.ceil(value)
    return math.floor(value)


def _above(bound: float | None, integral: bool) -> float:
    return -math.inf if bound is None else bound + integral


def _below(bound: float | None, integral: bool) -> float:
    return math.inf if bound is None else bound - integral


def array(schema: dict[str, Any], visit: Visit, context: Context, path: Path) -> dict[str, Any]:
    """Items and their number. A list in `items` (draft 7 and before) is `prefixItems`."""
    out = _counts(schema, "minItems", "maxItems", context, path)
    prefix, rest, prefix_key, rest_key = schema.get("prefixItems"), schema.get("items", True), "prefixItems", "items"
    if isinstance(rest, list):
        prefix, rest, prefix_key, rest_key = rest, schema.get("additionalItems", True), "items", "additionalItems"
    if prefix is not None:
        if not isinstance(prefix, list):
            context.refuse(f"has prefixItems that are {kind_of(prefix)} instead of a list", (*path, prefix_key))
        if prefix:
            out["prefixItems"] = [visit(item, (*path, prefix_key, i)) for i, item in enumerate(prefix)]
    items = visit(rest, (*path, rest_key))
    first_closed = next((i for i, item in enumerate(out.get("prefixItems", ())) if item is False), None)
    if first_closed is not None:  # nothing may stand there, so the array ends before
        out["prefixItems"] = out["prefixItems"][:first_closed]
        items = False
    if items is False:
        fixed = len(out.get("prefixItems", ()))
        if out.get("minItems", 0) > fixed:
            context.refuse(f"asks for at least {out['minItems']} items and allows {fixed}", path)
        out["maxItems"] = min(out.get("maxItems", fixed), fixed)
        items = not fixed
    if not out.get("prefixItems", True):
        del out["prefixItems"]
    out["items"] = items
    return out


def object_(schema: dict[str, Any], visit: Visit, context: Context, path: Path) -> dict[str, Any] | bool:
    """Properties. False when a required property can have no value."""
    out = _counts(schema, "minProperties", "maxProperties", context, path)
    properties = _subschemas(schema, "properties", visit, context, path)
    required = _required(schema, context, path)
    rest: Any = schema.get("additionalProperties")
    if rest is not None:
        rest = visit(rest, (*path, "additionalProperties"))
    patterns: dict[str, Schema] = {}
    for pattern, value in _subschemas(schema, "patternProperties", visit, context, path).items():
        text = checked_pattern(pattern, context, (*path, "patternProperties", pattern))
        if value is not False and text is not None:
            patterns[text] = value
    if patterns and (properties or len(patterns) > 1 or schema.get("additionalProperties", True) is not False):
        context.relax("patternProperties", path)  # of a name that more than one of them describes, one description is held
    for name, value in list(properties.items()):
        if value is False:
            if name in required:
                return False
            del properties[name]
            if rest is not None and rest is not False:
                rest = False  # the open rest would let the forbidden name in
    for name in required:
        if name not in properties:
            if rest is False and not patterns:
                context.refuse(f"requires {name!r} and does not allow it", (*path, "required"))
            properties[name] = rest if rest else True
    if len(properties) > context.limits.max_properties:
        context.refuse(f"has more than {context.limits.max_properties} properties", (*path, "properties"))
    least = out.get("minProperties", 0)
    if least <= len(required):
        out.pop("minProperties", None)
    if out.get("maxProperties", len(properties)) < len(required):
        context.refuse("requires more properties than maxProperties allows", (*path, "maxProperties"))
    described = "properties" in schema or bool(properties)
    if rest is None and not patterns and (not described or least > len(properties)):
        rest = True
    if rest is False and not patterns and least > len(properties):
        context.refuse("asks for more properties than it allows", (*path, "minProperties"))
    # XGrammar does not hold propertyNames next to described properties, and many of those take long to tell apart from others.
    costly = "propertyNames" in schema or distinct_prefixes(properties) > context.limits.max_open_prefixes
    if rest not in (None, False) and properties and costly and not patterns and least <= len(properties):
        rest = False
    if described and (properties or not patterns):
        out["properties"] = properties
    if required:
        out["required"] = required
    if patterns:
        out["patternProperties"] = patterns
    if "propertyNames" in schema and (properties or patterns):
        context.relax("propertyNames", path)
    if "propertyNames" in schema and not properties:
        out["propertyNames"] = visit(schema["propertyNames"], (*path, "propertyNames"))
        if out["propertyNames"] is False:  # no name is allowed, so there are no properties
            patterns, rest = {}, False
            out.pop("patternProperties", None)
        if out["propertyNames"] in (True, False):
            del out["propertyNames"]
    if rest is not None:
        out["additionalProperties"] = rest
    return out


def _subschemas(schema: dict[str, Any], key: str, visit: Visit, context: Context, path: Path) -> dict[str, Schema]:
    value = schema.get(key, {})
    if not isinstance(value, dict):
        context.refuse(f"has {key} that are {kind_of(value)} instead of an object", (*path, key))
    return {name: visit(child, (*path, key, name)) for name, child in value.items()}


def _required(schema: dict[str, Any], context: Context, path: Path) -> list[str]:
    value = schema.get("required", [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        context.refuse(f"has a required that is {kind_of(value)} instead of a list of names", (*path, "required"))
    return list(dict.fromkeys(value))


def _counts(schema: dict[str, Any], low: str, high: str, context: Context, path: Path) -> dict[str, Any]:
    """A pair of counts: whole, not negative, in order."""
    out: dict[str, int] = {}
    for key in (low, high):
        if key not in schema:
            continue
        value = schema[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value != int(value):
            context.refuse(f"has a {key} that is not a whole number", (*path, key))
        if value < 0:
            context.refuse(f"has a {key} below 0", (*path, key))
        out[key] = int(value)
    if out.get(low, 0) > out.get(high, math.inf):
        context.refuse(f"has a {low} of {out[low]} above its {high} of {out[high]}", (*path, low))
    most = context.limits.max_count
    if out.get(low, 0) > most:
        context.refuse(f"has a {low} above {most}", (*path, low))
    if out.get(high, 0) > most:
        del out[high]
    return out
