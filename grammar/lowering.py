"""From a structural tag to the one XGrammar compiles: JSON Schemas become EBNF in which JSON has one spelling.

XGrammar's own translation inside structural tags allows any white space between tokens, on which small models spin, and
lets a text be spelled in several ways, so that a history rendered again differs from what was generated. Here it is spelled
as `json.dumps(value, ensure_ascii=False)` does: ", " and ": ", and escapes only where JSON needs them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grammar.counted import count_characters
from grammar.limits import GrammarLimits
from grammar.pattern import PatternRefused
from grammar.schemas.context import Context, json_pointer
from grammar.schemas.cost import counting_milliseconds, estimated_milliseconds, pattern_milliseconds
from grammar.schemas.walk import prepare
from grammar.tools import GrammarRefused

ToEbnf = Callable[[dict[str, Any] | bool], str]

UNWRITABLE = "\U0010ffff"
"""A character that is none (Unicode 16, section 23.7). Special tokens are written with it, and no free text may hold it."""

MAX_REPEATED = 128
"""Counted repetition up to which a source counts as cheap."""

PYTHON_CALL = "python_call"
"""A style of json_schema that XGrammar does not know: keyword arguments of a call in Python."""

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
        self._patterns: set[str] = set()
        self._prepared: dict[str, dict[str, Any] | bool] = {}

    def read(self, node: Any, path: tuple[str | int, ...]) -> Any:
        """A format, with its schemas prepared."""
        if len(path) > 2 * MAX_DEPTH:
            raise GrammarRefused(f"The grammar nests more than {MAX_DEPTH} formats.", pointer=json_pointer(path))
        if isinstance(node, list):
            return [self.read(child, (*path, i)) for i, child in enumerate(node)]
        if not isinstance(node, dict):
            return node
        kind = node.get("type")
        if kind == "json_schema" and node.get("style", "json") in ("json", PYTHON_CALL):
            return self._schema(node, path)
        if kind == "regex" and isinstance(node.get("pattern"), str):
            cost = self._regex(node["pattern"], path)
            self.milliseconds += cost if node["pattern"] not in self._patterns else 1.0  # its masks are there
            self._patterns.add(node["pattern"])
        elif kind in ("grammar", "regex", "qwen_xml_parameter") or "style" in node or _is_long_repeat(node):
            self.milliseconds = float("inf")
        return {key: self.read(child, (*path, key)) if isinstance(child, dict | list) else child for key, child in node.items()}

    def _regex(self, pattern: str, path: tuple[str | int, ...]) -> float:
        """Milliseconds for a pattern of a format or of a caller."""
        if len(pattern) > self._limits.max_pattern_length:
            most = self._limits.max_pattern_length
            raise GrammarRefused(
                f"The pattern has {len(pattern)} characters; at most {most} are allowed.", pointer=json_pointer(path)
            )
        try:
            return pattern_milliseconds(pattern)
        except PatternRefused:
            return float("inf")  # XGrammar knows more of patterns outside of JSON than examine_pattern does

    def _schema(self, node: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise GrammarRefused("The grammar has a json_schema without a schema.", pointer=json_pointer(path))
        title = schema.get("title") if isinstance(schema, dict) else None
        tool = title if isinstance(title, str) else None
        written = json.dumps(schema)
        if written not in self._prepared:  # a schema that stands in several places is compiled once
            prepared = prepare(schema, Context(self._limits, tool), as_object=False)
            if prepared is False:
                raise GrammarRefused("The grammar has a schema that allows no value.", tool=tool, pointer="")
            cost = estimated_milliseconds(prepared)
            self.milliseconds += cost
            self.heaviest = max(self.heaviest, cost)
            self.counting_milliseconds = max(self.counting_milliseconds, counting_milliseconds(prepared))
            self._prepared[written] = prepared
        prepared = self._prepared[written]
        node = {**node, "json_schema": prepared}
        if set(node) <= {"type", "json_schema", "style"}:
            self.schemas.append((node, tool))
        return node


def _is_long_repeat(node: dict[str, Any]) -> bool:
    return node.get("type") == "repeat" and not (isinstance(node.get("max"), int) and 0 <= node["max"] <= MAX_REPEATED)


def lower(parsed: Parsed, to_ebnf: ToEbnf, specials: Mapping[str, int]) -> str:
    """The JSON text to compile. `to_ebnf` raises GrammarRefused or RuntimeError for a schema it cannot translate. `specials`:
    ids of the special tokens, which a `token` names by their written form."""
    _bind(parsed.tag["format"], specials)
    for node, tool in parsed.schemas:
        schema, mark = node["json_schema"], ""
        if node.get("style") == PYTHON_CALL:
            schema, mark = marked_keywords(schema)
        try:
            ebnf = to_ebnf(schema)
        except RuntimeError as error:
            raise GrammarRefused(_sentence(error, tool), tool=tool, pointer="") from error
        ebnf = one_spelling(ebnf)
        if mark:
            ebnf = in_python(ebnf, mark)
        node.clear()
        node.update(type="grammar", grammar=ebnf)
    return json.dumps(parsed.tag, ensure_ascii=False)


_ROOT = re.compile(r"^root(?:_part)?(?:_\d+)* ::= .*$", re.MULTILINE)


def marked_keywords(schema: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The schema of a call's arguments with a mark before the names of its own properties, so that they are told from those of
    objects inside it wherever XGrammar puts them; and the mark, which occurs nowhere else in it."""
    written = json.dumps(schema)
    mark = "="
    while mark in written:
        mark += "="
    properties = {mark + name: value for name, value in schema.get("properties", {}).items()}
    required = [mark + name for name in schema.get("required", ())]
    return {**schema, "properties": properties, "required": required}, mark


def in_python(ebnf: str, mark: str) -> str:
    """The EBNF of a JSON object of `marked_keywords` as that of a call's keyword arguments: `(city="Paris", days=3, now=True)`.

    Strings stay as JSON writes them, which Python reads too.
    """
    for word, python in (("true", "True"), ("false", "False"), ("null", "None")):
        ebnf = ebnf.replace(f'"{word}"', f'"{python}"')
    ebnf = re.sub(rf'"\\"{mark}(\w+)\\"" ": "', lambda key: f'"{key[1]}="', ebnf)
    return _ROOT.sub(lambda line: line[0].replace('"{"', '"("').replace('"}"', '")"'), ebnf)


def _bind(node: Any, specials: Mapping[str, int]) -> None:
    """Names of special tokens become ids, and free text leaves out what stands for special tokens (see UNWRITABLE)."""
    if isinstance(node, list):
        for child in node:
            _bind(child, specials)
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    if kind == "token" and isinstance(node.get("token"), str):
        token_id = specials.get(node["token"])
        if token_id is None:
            raise GrammarRefused(f"The grammar names the special token {node['token']!r}, which this tokenizer does not have.")
        node["token"] = token_id
    elif kind in ("any_text", "dispatch", "triggered_tags"):
        node["excludes"] = [*node.get("excludes", ()), UNWRITABLE]
    for key, child in node.items():
        if isinstance(child, dict | list) and key != "json_schema":
            _bind(child, specials)


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
