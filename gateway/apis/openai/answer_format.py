"""What an answer must look like: response_format, and the fields that vLLM and SGLang have for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.apis.openai.sampling import SamplingFields, bad_field
from grammar.limits import DEFAULT_LIMITS
from grammar.tools import ResponseFormat

_MAX_GRAMMAR = 256 * 1024
_MAX_CHOICES_BYTES = 1 << 20


def parse_answer_format(fields: SamplingFields) -> ResponseFormat:
    """The one of these fields that is given: response_format; guided_json, guided_regex, guided_choice, guided_grammar and
    structured_outputs of vLLM; regex and ebnf of SGLang. Raises TurnError 400 that names the field."""
    values = {name: getattr(fields, name) for name in _READERS}
    given = [name for name, value in values.items() if value is not None and not _is_text(value)]
    if not given:
        return ResponseFormat()
    if len(given) > 1:
        raise bad_field(given[1], f"{given[0]} says already what the answer must look like; keep one of them")
    return _READERS[given[0]](values[given[0]], given[0])


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _response_format(value: Any, field: str) -> ResponseFormat:
    if not isinstance(value, dict):
        raise bad_field(field, "an object with a type is expected")
    kind = value.get("type")
    if kind == "json_object":
        return ResponseFormat("json_object")
    if kind == "json_schema":
        described = value.get("json_schema")
        if not isinstance(described, dict):
            raise bad_field("response_format.json_schema", "an object with name and schema is expected")
        name = described.get("name")
        if name is not None and not isinstance(name, str):
            raise bad_field("response_format.json_schema.name", "a string is expected")
        schema = described.get("schema")
        if schema is None:
            return ResponseFormat("json_object", name=name)
        return ResponseFormat("json_schema", schema=_schema(schema, "response_format.json_schema.schema"), name=name)
    raise bad_field("response_format.type", 'use "text", "json_object" or "json_schema"')


def _structured_outputs(value: Any, field: str) -> ResponseFormat:
    if not isinstance(value, dict):
        raise bad_field(field, "an object is expected")
    given = {name: inner for name, inner in value.items() if inner is not None and name in _STRUCTURED}
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        raise bad_field(field, f"give exactly one of {', '.join(_STRUCTURED)}")
    ((name, inner),) = given.items()
    return _STRUCTURED[name](inner, f"{field}.{name}")


def _json(value: Any, field: str) -> ResponseFormat:
    return ResponseFormat("json_schema", schema=_schema(value, field))


def _json_object(value: Any, field: str) -> ResponseFormat:
    if value is not True:
        raise bad_field(field, "true is expected")
    return ResponseFormat("json_object")


def _regex(value: Any, field: str) -> ResponseFormat:
    return ResponseFormat("regex", text=_text(value, field, DEFAULT_LIMITS.max_pattern_length), field=field)


def _grammar(value: Any, field: str) -> ResponseFormat:
    text = _text(value, field, _MAX_GRAMMAR)
    if "::=" not in text or "root" not in text:
        raise bad_field(field, "an EBNF grammar with a rule `root ::= ...` is expected")
    return ResponseFormat("grammar", text=text, field=field)


def _choice(value: Any, field: str) -> ResponseFormat:
    if not isinstance(value, list) or not value:
        raise bad_field(field, "a list of at least one string is expected")
    for position, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            raise bad_field(f"{field}[{position}]", "a non-empty string is expected")
    if len(value) > DEFAULT_LIMITS.max_enum_values or sum(map(len, value)) > _MAX_CHOICES_BYTES:
        raise bad_field(field, f"at most {DEFAULT_LIMITS.max_enum_values} choices of 1 MiB together are taken")
    return ResponseFormat("choice", choices=tuple(dict.fromkeys(value)), field=field)


def _text(value: Any, field: str, most: int) -> str:
    if not isinstance(value, str) or not value:
        raise bad_field(field, "a non-empty string is expected")
    if len(value) > most:
        raise bad_field(field, f"it has {len(value)} characters; at most {most} are taken")
    return value


def _schema(value: Any, field: str) -> dict[str, Any] | bool:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise bad_field(field, "the text is not valid JSON") from error
    if not isinstance(value, dict | bool):
        raise bad_field(field, "a JSON Schema (an object or a boolean) is expected")
    return value


_Reader = Callable[[Any, str], ResponseFormat]
_STRUCTURED: dict[str, _Reader] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READERS: dict[str, _Reader] = {
    "response_format": _response_format,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
    "regex": _regex,
    "ebnf": _grammar,
}
