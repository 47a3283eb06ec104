"""One value against one JSON Schema, by the jsonschema library. Nothing is ever fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable

_NOTHING_FETCHED: Registry[Any] = Registry()
_MAX_FOUND = 8
_MAX_WORDS = 300


class NotCheckable(Exception):  # noqa: N818 - it is an answer, not a fault
    """The schema cannot be used to check anything; the text says why."""


def violations(schema: Mapping[str, Any] | bool, text: str) -> list[str]:
    """What of the schema the JSON text violates, at most a few sentences with JSON pointers; [] for a valid one.

    Raises NotCheckable for a schema that no validator takes, and ValueError for a text that is no JSON.
    """
    value = json.loads(text)
    known = without_nullable(schema)
    try:
        validator = _validator(known)
        found = []
        for error in validator.iter_errors(value):
            pointer = "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in error.absolute_path)
            found.append(f"{pointer or 'the value'}: {error.message[:_MAX_WORDS]} ({error.validator})")
            if len(found) >= _MAX_FOUND:
                break
    except Unresolvable as error:
        raise NotCheckable(f"a reference leads nowhere: {error}") from error
    except Exception as error:
        raise NotCheckable(f"{type(error).__name__}: {str(error)[:_MAX_WORDS]}") from error
    return found


def _validator(schema: Any) -> Validator:
    kind: Any = jsonschema.Draft202012Validator
    if isinstance(schema, dict):
        named = schema.get("$schema")
        if isinstance(named, str) and ("draft-04" in named or "draft-03" in named):
            kind = jsonschema.Draft7Validator  # what differs was rewritten
        elif isinstance(named, str):
            kind = jsonschema.validators.validator_for(schema, default=kind)
        elif _is_old(schema):
            kind = jsonschema.Draft7Validator
    made: Validator = kind(schema, registry=_NOTHING_FETCHED)
    return made


def _is_old(schema: Any) -> bool:
    """Whether it is written in draft 7 or before: tuples in `items`, `dependencies`, `additionalItems`."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if isinstance(node.get("items"), list) or isinstance(node.get("dependencies"), dict):
                return True
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return False


def without_nullable(schema: Any) -> Any:
    """A copy in which OpenAPI 3.0's `nullable` and draft 4's boolean bounds are what JSON Schema says today."""
    if isinstance(schema, list):
        return [without_nullable(child) for child in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: child if key in ("const", "enum", "default") else without_nullable(child) for key, child in schema.items()}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(copy.get(exclusive), bool) and copy.pop(exclusive) and bound in copy:
            copy[exclusive] = copy.pop(bound)
    if copy.get("nullable") is True and not isinstance(copy.get("nullable"), dict):
        del copy["nullable"]
        return {"anyOf": [copy, {"type": "null"}]}
    return copy
