"""Schemas without a part: what was found to violate them can no longer be written, and all the rest can."""

import json
import re

import jsonschema
import pytest

from grammar.limits import DEFAULT_LIMITS
from grammar.schema import prepare_parameters
from grammar.schemas.excluding import without_part

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}


def of(**properties):
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "pointer", "arguments", "allowed", "barred"),
    [
        (of(a={}, b={}), "/a", {"a": 1, "b": 2}, {"b": 2}, None),
        ({**of(a={}), "additionalProperties": True}, "/a", {"a": 1}, {}, {"a": 1}),
        ({**of(a={"enum": [1, "x"]}), "required": ["a"]}, "/a", {"a": 1}, {"a": "x"}, {"a": 1}),
        ({**of(a={"type": "boolean"}), "required": ["a"]}, "/a", {"a": True}, {"a": False}, {"a": True}),
        ({**of(a={"type": "integer"}), "required": ["a"]}, "/a", {"a": 4}, {"a": 5}, {"a": 4}),
        ({**of(a={"type": "string"}), "required": ["a"]}, "/a", {"a": "a.b"}, {"a": "acb"}, {"a": "a.b"}),
        ({**of(p=POINT), "required": ["p"]}, "/p/y", {"p": {"x": 1, "y": 2}}, {"p": {"x": 1}}, None),
        ({**of(p=POINT), "required": ["p"]}, "/p/x", {"p": {"x": 1}}, {"p": {"x": 2}}, {"p": {"x": 1}}),
        (of(t={"type": "array"}), "/t/0", {"t": [1, 1]}, {}, None),
        (of(**{"a/b~c": {}}), "/a~1b~0c", {"a/b~c": 1}, {}, None),
    ],
)
def test_the_part_is_left_out_and_nothing_else(schema, pointer, arguments, allowed, barred):
    before = json.dumps(schema)
    changed = without_part(schema, pointer, json.dumps(arguments))
    assert json.dumps(schema) == before
    assert changed != schema
    jsonschema.validate(allowed, changed)
    prepare_parameters("t", changed)
    if barred is not None:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(barred, changed)
    else:
        name = pointer.split("/")[-1 if "y" in pointer else 1].replace("~1", "/").replace("~0", "~")
        assert f'"{name}"' not in json.dumps(changed["properties"])


def test_a_reference_is_changed_where_it_is_used_alone():
    schema = {**of(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}), "$defs": {"p": POINT}, "required": ["a", "b"]}
    changed = without_part(schema, "/a/y", '{"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 2}}')
    assert list(changed["properties"]["a"]["properties"]) == ["x"]
    assert changed["properties"]["b"] == {"$ref": "#/$defs/p"}
    assert changed["$defs"] == {"p": POINT}
    rooted = without_part({"$ref": "#/$defs/p", "$defs": {"p": POINT}}, "/y", '{"x": 1, "y": 2}')
    assert list(rooted["properties"]) == ["x"]


@pytest.mark.parametrize(
    ("schema", "pointer", "arguments"),
    [
        (of(a={}), "the value", {"a": 1}),
        (of(a={}), "/gone", {"a": 1}),
        (True, "/a", {"a": 1}),
        ({**of(a={"const": 1}), "required": ["a"]}, "/a", {"a": 1}),
        ({**of(a={"enum": [1]}), "required": ["a"]}, "/a", {"a": 1}),
        ({**of(a={"type": "number"}), "required": ["a"]}, "/a", {"a": 1.5}),
        ({**of(a={"type": "string"}), "required": ["a"]}, "/a", {"a": "x" * 65}),
        ({**of(a={"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}, "/a", {"a": None}),
    ],
)
def test_where_no_part_can_be_left_out_it_says_so(schema, pointer, arguments):
    assert without_part(schema, pointer, json.dumps(arguments)) is None


@pytest.mark.parametrize("text", ["a", "ab", "a.b", "[x]-^\\", "漢字", "x" * 64])
def test_the_pattern_of_all_other_strings(text):
    schema = without_part({**of(a={"type": "string"}), "required": ["a"]}, "/a", json.dumps({"a": text}))
    pattern = schema["properties"]["a"]["pattern"]
    assert re.search(pattern, text) is None
    others = ["", text[:-1], text + "z", "q" + text, "q" + text[1:], text[:-1] + "q", "zz"]
    assert all(re.search(pattern, other) for other in others if other != text)


@pytest.mark.parametrize(
    ("bounds", "value", "left"),
    [
        ({"minimum": 1, "maximum": 3}, 1, {2, 3}),
        ({"minimum": 1, "maximum": 3}, 3, {1, 2}),
        ({"minimum": 1, "maximum": 3}, 2, {1, 3}),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 4}, 1, {2, 3}),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 4}, 3, {1, 2}),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 4, "exclusiveMaximum": True}, 3, {1, 2}),
        ({"minimum": 1, "maximum": 1}, 1, None),
    ],
)
def test_a_value_at_a_bound_leaves_a_schema_that_a_grammar_takes(bounds, value, left):
    schema = {"type": "object", "properties": {"n": {"type": "integer", **bounds}}, "required": ["n"]}
    changed = without_part(schema, "/n", json.dumps({"n": value}))
    if left is None:
        assert changed is None
        return
    prepared = prepare_parameters("f", changed, DEFAULT_LIMITS)
    assert {n for n in range(-9, 9) if jsonschema.Draft202012Validator(prepared).is_valid({"n": n})} == left
