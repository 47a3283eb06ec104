"""JSON Schemas of tools and answers, checked and put into the form XGrammar reads as it is meant.

Nothing is compiled here and xgrammar is not imported: a bad schema is refused at once, with the tool's name and a JSON
pointer (RFC 6901). What XGrammar 0.2.9 would misread and whose meaning is clear is rewritten: `nullable`, tuples in `items`,
boolean exclusive bounds, constraints beside anyOf / oneOf / allOf / $ref, constraints without a type, required properties
that are not described, patterns that are not anchored.

Annotations and the keywords of UNENFORCED are left out. An object that describes properties and has no
`additionalProperties` is closed: the model writes the described ones only. So is one that allows further properties beside
many described ones, because telling their names apart would take seconds to compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.schemas.context import Context, kind_of
from grammar.schemas.walk import prepare
from grammar.tools import GrammarRefused

__all__ = ["UNENFORCED", "GrammarLimits", "prepare_parameters", "prepare_schema"]

UNENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedProperties", "unevaluatedItems"),
    )
)
"""Keywords whose meaning no grammar holds; finished arguments can be checked against them afterwards.

Also not enforced: overlapping oneOf branches (treated as anyOf), lookahead in patterns, length limits beside a pattern or
format, a maxLength above GrammarLimits.max_counted_length, multipleOf of numbers that are not integers, one of two patterns
or anyOf that apply to the same place.
"""


def prepare_parameters(
    name: str, parameters: Mapping[str, Any] | None, limits: GrammarLimits = DEFAULT_LIMITS
) -> dict[str, Any]:
    """The prepared schema of a tool's arguments, always of an object. Raises GrammarRefused.

    A tool that describes no parameters (None or {}) takes exactly {}.
    """
    if parameters is not None and not isinstance(parameters, dict):
        message = f"The parameters of tool {name!r} must be a JSON Schema object, not {kind_of(parameters)}."
        raise GrammarRefused(message, tool=name, pointer="")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    prepared = prepare(parameters, Context(limits, name), as_object=True)
    if not isinstance(prepared, dict):
        raise GrammarRefused(f"The parameters of tool {name!r} allow no arguments at all.", tool=name, pointer="")
    return prepared


def prepare_schema(schema: Mapping[str, Any] | bool, limits: GrammarLimits = DEFAULT_LIMITS) -> dict[str, Any] | bool:
    """The prepared schema of an answer. Raises GrammarRefused, with `tool` None."""
    if not isinstance(schema, dict | bool):
        raise GrammarRefused(f"A JSON Schema must be an object or a boolean, not {kind_of(schema)}.", pointer="")
    prepared = prepare(schema, Context(limits, None), as_object=False)
    if prepared is False:
        raise GrammarRefused("The schema of the response format allows no value at all.", pointer="")
    return prepared
