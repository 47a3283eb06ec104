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
from grammar.schemas.context import kind_of
from grammar.schemas.ladder import LAST_RUNG, Relaxed, anything_checked, on_ladder
from grammar.schemas.unenforced import UNENFORCED
from grammar.tools import GrammarRefused

__all__ = ["UNENFORCED", "GrammarLimits", "prepare_parameters", "prepare_schema"]


def prepare_parameters(
    name: str,
    parameters: Mapping[str, Any] | None,
    limits: GrammarLimits = DEFAULT_LIMITS,
    *,
    rung: int = 0,
    relaxed: Relaxed | None = None,
) -> dict[str, Any]:
    """The prepared schema of a tool's arguments, always of an object. Raises GrammarRefused.

    A tool that describes no parameters (None or {}) takes exactly {}. `rung`: where on the ladder (grammar.schemas.ladder) to
    begin; where the schema would cost too much there, more of it is left out. `relaxed`: takes the (keyword, JSON pointer)
    pairs that the result does not hold.
    """
    if parameters is not None and not isinstance(parameters, dict):
        message = f"The parameters of tool {name!r} must be a JSON Schema object, not {kind_of(parameters)}."
        raise GrammarRefused(message, tool=name, pointer="")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if rung >= LAST_RUNG:
        return anything_checked(parameters, limits, name, relaxed)
    prepared = on_ladder(parameters, limits, name, as_object=True, rung=rung, relaxed=relaxed)
    if not isinstance(prepared, dict):
        raise GrammarRefused(f"The parameters of tool {name!r} allow no arguments at all.", tool=name, pointer="")
    return prepared


def prepare_schema(
    schema: Mapping[str, Any] | bool,
    limits: GrammarLimits = DEFAULT_LIMITS,
    *,
    rung: int = 0,
    relaxed: Relaxed | None = None,
) -> dict[str, Any] | bool:
    """The prepared schema of an answer. Raises GrammarRefused, with `tool` None. `rung` and `relaxed` as above."""
    if not isinstance(schema, dict | bool):
        raise GrammarRefused(f"A JSON Schema must be an object or a boolean, not {kind_of(schema)}.", pointer="")
    if rung >= LAST_RUNG and isinstance(schema, dict):
        anything_checked(schema, limits, None, relaxed)
        return True
    prepared = on_ladder(schema, limits, None, as_object=False, rung=rung, relaxed=relaxed)
    if prepared is False:
        raise GrammarRefused("The schema of the response format allows no value at all.", pointer="")
    return prepared
