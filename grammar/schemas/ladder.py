"""What is left out of a schema that would cost too much: as little as will do, and always by name.

Each rung leaves out more keywords than the one before. The last one holds nothing but that the arguments are an object; what is
left out is checked in the finished arguments instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grammar.limits import GrammarLimits
from grammar.schemas.context import Context
from grammar.schemas.merge import ANNOTATIONS, Schema
from grammar.schemas.walk import measure, prepare
from grammar.tools import GrammarRefused

Relaxed = dict[tuple[str, str], None]
"""(keyword, JSON pointer of the schema it stands in), in the order met."""

_PATTERNS = frozenset(("pattern", "patternProperties"))
_COUNTS = frozenset(("minProperties", "maxProperties", "minLength", "maxLength", "minItems", "maxItems", "format"))
_VALUES = frozenset(("enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "propertyNames"))
RUNGS = (frozenset[str](), _PATTERNS, _PATTERNS | _COUNTS, _PATTERNS | _COUNTS | _VALUES)
LAST_RUNG = len(RUNGS)
"""Any object (or, for an answer, any JSON)."""


def on_ladder(
    schema: Mapping[str, Any] | bool,
    limits: GrammarLimits,
    tool: str | None,
    *,
    as_object: bool,
    rung: int,
    relaxed: Relaxed | None,
) -> Schema:
    """The prepared schema, from `rung` down until it can be compiled in time. Raises GrammarRefused for what is wrong."""
    root: Any = schema
    for dropped in RUNGS[rung:]:
        context = Context(limits, tool, dropped)
        try:
            prepared = prepare(root, context, as_object=as_object)
        except GrammarRefused as refused:
            if not refused.costly:
                raise
            continue
        if relaxed is not None:
            relaxed.update(context.relaxed)
        return prepared
    anything_checked(root, limits, tool, relaxed)
    return {"type": "object", "additionalProperties": True} if as_object else True


def anything_checked(
    schema: Mapping[str, Any], limits: GrammarLimits, tool: str | None, relaxed: Relaxed | None
) -> dict[str, Any]:
    """A schema of any object, with every keyword of `schema` noted as relaxed. Raises GrammarRefused for what is too deep or
    too large to be checked afterwards either."""
    context = Context(limits, tool)
    measure(dict(schema), context)
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            for key, child in node.items():
                if key in KEYWORDS:
                    context.relax(key, ())
                stack.append(child)
        elif isinstance(node, list):
            stack.extend(node)
    if relaxed is not None:
        relaxed.update(context.relaxed)
    return {"type": "object", "additionalProperties": True}


KEYWORDS = (
    frozenset(
        (
            *("type", "properties", "required", "additionalProperties", "items", "prefixItems", "additionalItems"),
            *("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "const", "$ref", "contains", "uniqueItems"),
            *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
        )
    )
    | _PATTERNS
    | _COUNTS
    | _VALUES
) - ANNOTATIONS
