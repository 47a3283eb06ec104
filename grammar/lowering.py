"""From a structural tag to the one XGrammar compiles: JSON Schemas become EBNF in which JSON has one spelling.

XGrammar's own translation inside structural tags allows any white space between tokens, on which small models spin, and
lets a text be spelled in several ways, so that a history rendered again differs from what was generated. Here it is spelled
as `json.dumps(value, ensure_ascii=False)` does: ", " and ": ", and escapes only where JSON needs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grammar.counted import count_characters
from grammar.limits import GrammarLimits
from grammar.schemas.context import Context, json_pointer
from grammar.schemas.cost import counting_milliseconds, estimated_milliseconds
from grammar.schemas.walk import prepare
from grammar.tools import GrammarRefused

ToEbnf = Callable[[dict[str, Any] | bool], str]

MAX_DEPTH = 64
"""Formats nested in formats; real ones have fewer than ten."""

ESCAPE_RULE = (
    'basic_escape ::= (([\\"\\\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))\n'  # as XGrammar writes it
)
_ESCAPE_RULE = 'basic_escape ::= (([\\"\\\\bfnrt]) | ("u" "0" "0" (("0" [0-7be]) | ("0" "f") | ("1" [0-9a-f]))))\n'


@dataclass(frozen=True, slots=True)
class Parsed:
    """A checked structural tag. `milliseconds`: estimated compile time of all, `heaviest` of its heaviest schema; infinite
    where nothing is known."""

    tag: dict[str, Any]
    schemas: tuple[tuple[dict[str, Any], str | None], ...]
    milliseconds: float
    heaviest: float

    def is_cheap(self, limits: GrammarLimits) -> bool:
        """Whether it may be compiled where nothing can stop it."""
        return self.milliseconds <= limits.cheap_milliseconds and self.heaviest <= limits.cheap_schema_milliseconds


def parse_source(source: str, limits: GrammarLimits) -> Parsed:
    """Reads a structural tag's JSON text and prepares its schemas. Raises GrammarRefused."""
    if len(source) > limits.max_source_bytes:
        raise GrammarRefused(f"The grammar takes {len(source)} characters; at most {limits.max_source_bytes} are allowed.")
    try:
        tag = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"The grammar is not valid JSON: {error}.") from error
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise GrammarRefused('The grammar must be a structural tag: {"type": "structural_tag", "format": {...}}.')
    reader = _Reader(limits)
    tag["format"] = reader.read(tag["format"], ("format",))
    return Parsed(tag, tuple(reader.schemas), reader.milliseconds + reader.counting_milliseconds, reader.heaviest)


class _Reader:
    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self.schemas: list[tuple[dict[str, Any], str | None]] = []
        self.milliseconds = 0.0
        self.heaviest = 0.0
        self.counting_milliseconds = 0.0

    def read(self, node: Any, path: tuple[str | int, ...]) -> Any:
        """A format, with its schemas prepared."""
        if len(path) > 2 * MAX_DEPTH:
            raise GrammarRefused(f"The grammar nests more than {MAX_DEPTH} formats.", pointer=json_pointer(path))
        if isinstance(node, list):
            return [self.read(child, (*path, i)) for i, child in enumerate(node)]
        if not isinstance(node, dict):
            return node
        kind = node.get("type")
        if kind in ("grammar", "regex", "qwen_xml_parameter", "repeat") or node.get("style", "json") != "json":
            self.milliseconds = float("inf")
        elif kind == "json_schema":
            return self._schema(node, path)
        return {key: self.read(child, (*path, key)) if isinstance(child, dict | list) else child for key, child in node.items()}

    def _schema(self, node: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise GrammarRefused("The grammar has a json_schema without a schema.", pointer=json_pointer(path))
        title = schema.get("title") if isinstance(schema, dict) else None
        tool = title if isinstance(title, str) else None
        prepared = prepare(schema, Context(self._limits, tool), as_object=False)
        if prepared is False:
            raise GrammarRefused("The grammar has a schema that allows no value.", tool=tool, pointer="")
        cost = estimated_milliseconds(prepared)
        self.milliseconds += cost
        self.heaviest = max(self.heaviest, cost)
        self.counting_milliseconds = max(self.counting_milliseconds, counting_milliseconds(prepared))
        node = {**node, "json_schema": prepared}
        if set(node) <= {"type", "json_schema", "style"}:
            self.schemas.append((node, tool))
        return node


def lower(parsed: Parsed, to_ebnf: ToEbnf) -> str:
    """The JSON text to compile. `to_ebnf` raises GrammarRefused or RuntimeError for a schema it cannot translate."""
    for node, tool in parsed.schemas:
        try:
            ebnf = to_ebnf(node["json_schema"])
        except RuntimeError as error:
            raise GrammarRefused(_sentence(error, tool), tool=tool, pointer="") from error
        node.clear()
        node.update(type="grammar", grammar=one_spelling(ebnf))
    return json.dumps(parsed.tag, ensure_ascii=False)


def one_spelling(ebnf: str) -> str:
    """XGrammar's EBNF of a JSON Schema, with one way to write each string."""
    return count_characters(ebnf.replace(ESCAPE_RULE, _ESCAPE_RULE))


def _sentence(error: Exception, tool: str | None) -> str:
    whose = "a schema" if tool is None else f"the schema of tool {tool!r}"
    return f"No grammar can be made of {whose}: {error_text(error)}."


def error_text(error: Exception) -> str:
    """What XGrammar says, without the time and the place in its source."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    return last.split(".cc:", 1)[-1].split(": ", 1)[-1].strip().rstrip(".")[:300]
