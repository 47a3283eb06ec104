"""The grammar of arguments that are written field by field, with strings as they are: see `grammar.calls.fields`.

Fields stand in the order of the schema. Further fields are allowed only where none is described.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grammar.calls.values import STRING, json_types
from grammar.formats import tags
from grammar.tools import GrammarRefused, Tool

_MAX_ALTERNATIVES = 64
_CONSTRAINTS = ("pattern", "format", "minLength", "maxLength")


@dataclass(frozen=True, slots=True)
class FieldTexts:
    """What stands around a field's key and its value. `value_end`: no string holds it; `after` follows it. `key_stop`: no key
    of an undescribed field holds these characters."""

    before_key: str
    after_key: str
    value_end: str
    after: str
    key_stop: str = "<>"
    special_tokens: frozenset[str] = frozenset()
    """Which of these texts' parts are special tokens of the model's tokenizer."""

    def tags(self, text: str) -> list[tags.Tag]:
        """A text as tags, special tokens in it as tokens."""
        found = [(text.index(token), token) for token in self.special_tokens if token in text]
        if not found:
            return [tags.text(text)] if text else []
        at, token = min(found)
        return [*self.tags(text[:at]), {"type": "token", "token": token}, *self.tags(text[at + len(token) :])]


def fields(schemas: tags.Schemas, tool: Tool, texts: FieldTexts) -> tags.Tag:
    """A tool's arguments, without what stands around all of them. Raises GrammarRefused."""
    prepared = schemas.parameters(tool)
    writer = _Writer(schemas, tool.name, prepared, texts)
    return tags.one_of([writer.object(branch) for branch in writer.objects(prepared, 0)])


class _Writer:
    def __init__(self, schemas: tags.Schemas, tool: str, root: Mapping[str, Any], texts: FieldTexts) -> None:
        self._schemas = schemas
        self._tool = tool
        self._root = root
        self._texts = texts

    def objects(self, schema: Any, depth: int) -> list[Mapping[str, Any]]:
        """The object schemas that the root of the arguments may be."""
        while isinstance(schema, dict) and "$ref" in schema and depth < _MAX_ALTERNATIVES:
            schema = self._definition(schema["$ref"])
            depth += 1
        if schema is True:
            return [{"type": "object"}]
        if isinstance(schema, dict) and "anyOf" in schema and depth < _MAX_ALTERNATIVES:
            found = [each for branch in schema["anyOf"] for each in self.objects(branch, depth + 1)]
            if 0 < len(found) <= _MAX_ALTERNATIVES:
                return found
        types = schema.get("type", "object") if isinstance(schema, dict) else None
        if types == "object" or (isinstance(types, list) and "object" in types):
            return [schema]
        raise GrammarRefused(
            f"The arguments of tool {self._tool!r} are too many alternatives to be written as fields.",
            tool=self._tool,
            pointer="",
        )

    def _definition(self, ref: str) -> Any:
        return self._root.get("$defs", {}).get(ref.removeprefix("#/$defs/"))

    def object(self, schema: Mapping[str, Any]) -> tags.Tag:
        properties = schema.get("properties", {})
        for keyword in ("minProperties", "maxProperties"):
            if keyword in schema and properties:
                self._schemas.note(self._tool, keyword)
        if not properties:
            return self._open(schema)
        required = set(schema.get("required", ()))
        elements = []
        for name, value in properties.items():
            field = self._field(name, value)
            elements.append(field if name in required else tags.optional(field))
        return tags.sequence(*elements)

    def _open(self, schema: Mapping[str, Any]) -> tags.Tag:
        """An object that describes no fields."""
        rest = schema.get("additionalProperties", "patternProperties" not in schema and "properties" not in schema)
        if rest is False:
            if "patternProperties" in schema:
                self._schemas.note(self._tool, "patternProperties")
            else:
                return tags.text("")
        for keyword in ("propertyNames", "patternProperties", "minProperties", "maxProperties"):
            if keyword in schema:
                self._schemas.note(self._tool, keyword)
        texts = self._texts
        key = tags.regex(f"[^{texts.key_stop}\\n]+")
        value = self._value(rest if isinstance(rest, dict) else {}, texts.after_key)
        return {"type": "star", "content": tags.sequence(*texts.tags(texts.before_key), key, value)}

    def _field(self, name: str, value: Any) -> tags.Tag:
        texts = self._texts
        if any(char in name for char in texts.key_stop + "\n"):
            raise GrammarRefused(
                f"The parameter {name!r} of tool {self._tool!r} cannot be written in this model's tool-call format; rename it.",
                tool=self._tool,
                pointer=f"/properties/{name}",
            )
        return self._value(value, f"{texts.before_key}{name}{texts.after_key}")

    def _value(self, schema: Any, before: str) -> tags.Tag:
        """A value between the texts around it."""
        end, after = self._texts.value_end, self._texts.value_end + self._texts.after
        resolved = schema
        for _ in range(_MAX_ALTERNATIVES):
            if not (isinstance(resolved, dict) and "$ref" in resolved):
                break
            resolved = self._definition(resolved["$ref"])
        constraints = resolved if isinstance(resolved, dict) else {}
        fixed = [constraints["const"]] if "const" in constraints else constraints.get("enum")
        if fixed is not None:
            written = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in fixed]
            possible = [text for text in dict.fromkeys(written) if end not in text]
            if not possible:
                raise GrammarRefused(
                    f"No enum value of tool {self._tool!r} can be written in this model's tool-call format.",
                    tool=self._tool,
                    pointer="",
                )
            one = tags.one_of([tags.text(text) for text in possible])
            return tags.sequence(*self._texts.tags(before), one, *self._texts.tags(after))
        types = json_types(constraints, self._root)
        if "string" not in types:
            content = {"type": "json_schema", "json_schema": self._with_definitions(constraints)}
            return tags.sequence(*self._texts.tags(before), content, *self._texts.tags(after))
        if types != STRING:
            if set(constraints) - {"type"}:
                self._schemas.note(self._tool, *self._constraining(constraints))
            return self._string(before, tags.text_without())
        if "pattern" in constraints:
            pattern = tags.regex(constraints["pattern"])
            return tags.sequence(*self._texts.tags(before), pattern, *self._texts.tags(after))
        content = tags.text_without()
        for keyword in _CONSTRAINTS:
            if keyword == "maxLength" and keyword in constraints:
                content["max_chars"] = constraints[keyword]
            elif keyword in constraints:
                self._schemas.note(self._tool, keyword)
        if set(constraints) - {"type", *_CONSTRAINTS}:
            self._schemas.note(self._tool, *self._constraining(constraints))
        return self._string(before, content)

    def _string(self, before: str, content: tags.Tag) -> tags.Tag:
        texts = self._texts
        if texts.value_end in texts.special_tokens:  # no text holds it
            return tags.sequence(*texts.tags(before), content, *texts.tags(texts.value_end + texts.after))
        opening, value = texts.tags(before), tags.tag("", content, texts.value_end)
        return tags.sequence(*opening, value, *texts.tags(texts.after))

    def _constraining(self, schema: Mapping[str, Any]) -> list[str]:
        """The keywords of a value that is text and may be more."""
        return sorted(set(schema) - {"type", "$ref", "title"}) or ["type"]

    def _with_definitions(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        definitions = {"$defs": self._root["$defs"]} if "$defs" in self._root else {}
        return {"title": self._tool, **schema, **definitions}


Fields = Callable[[tags.Schemas, Tool], tags.Tag]
