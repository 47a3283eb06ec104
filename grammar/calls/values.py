"""What a value that is written without quotes means, by the types its schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ANY = frozenset(("object", "array", "string", "integer", "number", "boolean", "null"))
STRING = frozenset(("string",))
_MAX_DEPTH = 16


def value_types(parameters: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """The JSON types that the schema of a tool allows for the field `key`; all of them where it says nothing."""
    if not isinstance(parameters, dict):
        return ANY
    return _field(parameters, key, parameters, 0)


def _field(schema: Any, key: str, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return ANY
    if "$ref" in schema:
        return _field(_resolved(schema["$ref"], root), key, root, depth + 1)
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return json_types(properties[key], root, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        if isinstance(branches, list):
            found = [_field(branch, key, root, depth + 1) for branch in branches]
            told = [types for types in found if types != ANY]
            if told:
                return frozenset().union(*told)
    rest = schema.get("additionalProperties")
    return json_types(rest, root, depth + 1) if isinstance(rest, dict) else ANY


def json_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a subschema of `root` allows, as far as its keywords tell without being tried."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return ANY
    types = ANY
    if "$ref" in schema:
        types &= json_types(_resolved(schema["$ref"], root), root, depth + 1)
    named = schema.get("type")
    if isinstance(named, str | list):
        names = frozenset([named] if isinstance(named, str) else [name for name in named if isinstance(name, str)])
        types &= (names | {"integer"}) if "number" in names else names
    if "const" in schema:
        types &= _types_of(schema["const"])
    if isinstance(schema.get("enum"), list):
        types &= frozenset().union(*map(_types_of, schema["enum"]))
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        if isinstance(branches, list) and branches:
            types &= frozenset().union(*(json_types(branch, root, depth + 1) for branch in branches))
    for branch in schema.get("allOf", ()) if isinstance(schema.get("allOf"), list) else ():
        types &= json_types(branch, root, depth + 1)
    if schema.get("nullable") is True:
        types |= {"null"}
    return types or ANY


def _resolved(ref: object, root: Mapping[str, Any]) -> Any:
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    here: Any = root
    for part in ref[2:].split("/") if len(ref) > 1 else ():
        key = part.replace("~1", "/").replace("~0", "~")
        here = here.get(key) if isinstance(here, dict) else None
    return here


def _types_of(value: object) -> frozenset[str]:
    if value is None:
        return frozenset(("null",))
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int | float):
        return frozenset(("integer", "number")) if float(value).is_integer() else frozenset(("number",))
    if isinstance(value, str):
        return STRING
    return frozenset(("array",)) if isinstance(value, list) else frozenset(("object",))


_PYTHON = {"True": "true", "False": "false", "None": "null"}


def value_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written as `text`: one of the types that are no strings where it is one, else a string.

    Where strings are allowed too, only what JSON writes in just this way counts as something else: "1.50" stays a string.
    """
    written = text.strip()
    written = _PYTHON.get(written, written)
    if types != STRING:
        try:
            value = json.loads(written, parse_constant=_refuse)
        except (ValueError, RecursionError):
            value = text
        if not isinstance(value, str) and types & _types_of(value):
            if "string" not in types or json.dumps(value, ensure_ascii=False) == written:
                return written
        elif isinstance(value, str) and value is not text and "string" not in types:
            return written
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(name)
