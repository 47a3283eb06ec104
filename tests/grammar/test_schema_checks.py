# ruff: noqa: E501 - tables of schemas, one a line
"""Schemas that cannot be grammars are refused at once, by tool and JSON pointer; the others come out as XGrammar reads them."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.formats.hermes import HermesFormat
from grammar.limits import GrammarLimits
from grammar.pattern import PatternRefused, examine_pattern
from grammar.schema import prepare_parameters, prepare_schema
from grammar.tools import GrammarRefused, ResponseFormat, Tool, ToolChoice


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def at_x(schema):
    return {"type": "object", "properties": {"ok": {"type": "string"}, "x": schema}}


def resolve(schema, pointer):
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    return schema


CHAIN = 4_000
REFUSED = {
    "1000 levels": (nested(1000), "/properties/a/properties/a", "nests too deeply; at most 64 levels"),
    "65 levels": (nested(65), "", "nests too deeply"),
    "1000 levels of arrays": (at_x({"default": json.loads("[" * 900 + "]" * 900)}), "/properties/x/default/0", "nests too deeply"),
    "bad pattern": (at_x({"type": "string", "pattern": "("}), "/properties/x/pattern", "'(' that is never closed"),
    "property class": (at_x({"pattern": "^\\p{L}$"}), "/properties/x/pattern", "Unicode property class"),
    "pattern as number": (at_x({"type": "string", "pattern": 5}), "/properties/x/pattern", "a number instead of a string"),
    "bad pattern property": (at_x({"patternProperties": {"a/(": {}}}), "/properties/x/patternProperties/a~1(", "never closed"),
    "empty enum": (at_x({"enum": []}), "/properties/x/enum", "empty enum"),
    "enum as object": (at_x({"enum": {}}), "/properties/x/enum", "an object instead of a list"),
    "enum of another type": (at_x({"type": "string", "enum": [1, 2]}), "/properties/x/enum", "without any value of type string"),
    "const of another type": (at_x({"type": "integer", "const": "a"}), "/properties/x/const", "not of type integer"),
    "min above max": (at_x({"type": "integer", "minimum": 5, "maximum": 4}), "/properties/x", "minimum above its maximum"),
    "no integer between": (at_x({"type": "integer", "exclusiveMinimum": 1, "maximum": 1.5}), "/properties/x", "no number fits"),
    "bound as string": (at_x({"type": "number", "minimum": "0"}), "/properties/x/minimum", "a string instead of a finite number"),
    "multiple of zero": (at_x({"type": "integer", "multipleOf": 0}), "/properties/x/multipleOf", "not above 0"),
    "lengths": (at_x({"type": "string", "minLength": 5, "maxLength": 2}), "/properties/x/minLength", "5 above its maxLength of 2"),
    "half a length": (at_x({"type": "string", "minLength": 1.5}), "/properties/x/minLength", "not a whole number"),
    "negative length": (at_x({"type": "string", "maxLength": -1}), "/properties/x/maxLength", "below 0"),
    "endless string": (at_x({"type": "string", "minLength": 2**40}), "/properties/x/minLength", "above 2147483647"),
    "items": (at_x({"type": "array", "minItems": 3, "maxItems": 2}), "/properties/x/minItems", "3 above its maxItems of 2"),
    "closed items": (at_x({"prefixItems": [{}], "items": False, "minItems": 2}), "/properties/x", "asks for at least 2 items and allows 1"),
    "item as number": (at_x({"type": "array", "items": 3}), "/properties/x/items", "a number where a schema"),
    "bad tuple": (at_x({"type": "array", "items": [{"type": "dict"}]}), "/properties/x/items/0/type", "did you mean 'object'?"),
    "python types": (at_x({"type": "dict"}), "/properties/x/type", "did you mean 'object'?"),
    "unknown type": (at_x({"type": "thing"}), "/properties/x/type", "which is none of object, array"),
    "no type": (at_x({"type": []}), "/properties/x/type", "empty list of types"),
    "type as object": (at_x({"type": {"a": 1}}), "/properties/x/type", "none of"),
    "not an object": ({"type": "array"}, "/type", "the arguments of a tool are an object"),
    "properties as list": (at_x({"properties": []}), "/properties/x/properties", "a list instead of an object"),
    "null property": (at_x(None), "/properties/x", "null where a schema"),
    "required as string": (at_x({"required": "a"}), "/properties/x/required", "instead of a list of names"),
    "required outside": ({"properties": {}, "required": ["a"], "additionalProperties": False}, "/required", "requires 'a' and does not"),
    "too many asked": (at_x({"properties": {"a": {}}, "additionalProperties": False, "minProperties": 2}), "/properties/x", "more properties than"),
    "too many required": (at_x({"required": ["a", "b"], "maxProperties": 1}), "/properties/x/maxProperties", "maxProperties allows"),
    "2000 properties": ({"properties": {f"p{i}": {} for i in range(2000)}}, "/properties", "more than 1000 properties"),
    "properties in many branches": ({"allOf": [{"properties": {f"p{i}": {}}} for i in range(15_000)]}, "/allOf", "more than 1000"),
    "empty anyOf": (at_x({"anyOf": []}), "/properties/x/anyOf", "an empty list in anyOf"),
    "anyOf as object": (at_x({"anyOf": {}}), "/properties/x/anyOf", "an object in anyOf"),
    "number in oneOf": (at_x({"oneOf": [{}, 3]}), "/properties/x/oneOf/1", "a number where a schema"),
    "null in allOf": (at_x({"allOf": [None]}), "/properties/x/allOf/0", "null where a schema"),
    "anyOf times oneOf": (
        at_x({"type": "string", "anyOf": [{"minLength": i} for i in range(150)], "oneOf": [{"maxLength": 999 + i} for i in range(150)]}),
        "/properties/x/anyOf/",
        "more than 20000 subschemas",
    ),
    "remote reference": (at_x({"$ref": "https://example.com/s.json"}), "/properties/x", "remote $ref"),
    "missing reference": (at_x({"$ref": "#/$defs/gone"}), "/properties/x", "points nowhere"),
    "anchor": (at_x({"$ref": "#here"}), "/properties/x", "use a JSON pointer"),
    "reference as number": (at_x({"$ref": 5}), "/properties/x", "not a string"),
    "reference to a list": ({**at_x({"$ref": "#/required"}), "required": []}, "/properties/x", "no schema"),
    "circle": ({**at_x({"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "/properties/x", "circular"),
    "circle with more": (
        {**at_x({"$ref": "#/$defs/a", "minimum": 1}), "$defs": {"a": {"$ref": "#/$defs/a", "maximum": 3}}},
        "/properties/x",
        "circular",
    ),
    "requires itself": ({**at_x({"$ref": "#"}), "required": ["x"]}, "", "requires itself without end"),
    "chain of allOf": (
        {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(CHAIN)} | {f"d{CHAIN}": {}}},
        "/$defs/d",
        "combines schemas too often",
    ),
    "too large": ({"description": "x" * 2_000_000}, "", "at most 1048576 are allowed"),
    "surrogate": ({"description": "\ud800"}, "", "not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_schema_is_refused_at_once_by_tool_and_pointer(name):
    schema, pointer, words = REFUSED[name]
    begun = time.thread_time()
    with pytest.raises(GrammarRefused) as refused:
        HermesFormat().structural_tag([Tool("fine"), Tool("bad_tool", parameters=schema)])
    assert time.thread_time() - begun < 1.0
    error = refused.value
    assert error.tool == "bad_tool"
    assert error.pointer.startswith(pointer)
    assert words in error.message
    assert "'bad_tool'" in error.message
    assert error.message[-1] in ".?"
    assert len(error.message) < 1_000
    if name == "anyOf times oneOf":  # the oneOf stands beside the anyOf and was merged into its branches
        error.pointer = error.pointer.partition("/oneOf/")[0]
    resolve(schema, error.pointer)


SERVED = {
    "counted dots": ({"type": "string", "pattern": "^.{0,5000}$"}, {("pattern", "/properties/x")}),
    "nested counts": ({"type": "string", "pattern": "(a{0,99}b){0,99}"}, {("pattern", "/properties/x")}),
    "long pattern": ({"type": "string", "pattern": "a" * 5000}, {("pattern", "/properties/x")}),
    "lookbehind": ({"type": "string", "pattern": "(?<=a)b"}, {("pattern", "/properties/x")}),
    "lookahead": ({"type": "string", "pattern": "^(?=.*[0-9]).+$"}, {("pattern", "/properties/x")}),
    "quote": ({"type": "string", "pattern": '^"a"$'}, {("pattern", "/properties/x")}),
    "length beside pattern": ({"type": "string", "pattern": "^a+$", "maxLength": 3}, {("maxLength", "/properties/x")}),
    "length beside format": ({"type": "string", "format": "date", "minLength": 3}, {("minLength", "/properties/x")}),
    "long text": ({"type": "string", "maxLength": 100_000}, {("maxLength", "/properties/x")}),
    "huge enum": ({"enum": [f"v{i}" for i in range(20_000)]}, {("enum", "/properties/x")}),
    "bound beyond": ({"type": "integer", "minimum": 1e300}, {("minimum", "/properties/x")}),
    "bound beyond the other way": ({"type": "integer", "maximum": 1e300}, set()),
    "fraction": ({"type": "number", "multipleOf": 0.5}, {("multipleOf", "/properties/x")}),
    "not": ({"type": "string", "not": {"const": "a"}}, {("not", "/properties/x")}),
    "conditions": (
        {"type": "object", "if": {}, "then": {}, "else": {}, "dependentRequired": {"a": ["b"]}},
        {(key, "/properties/x") for key in ("if", "then", "else", "dependentRequired")},
    ),
    "unique": ({"type": "array", "uniqueItems": True, "contains": {}}, {(key, "/properties/x") for key in ("uniqueItems", "contains")}),
    "overlapping oneOf": ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, {("oneOf", "/properties/x")}),
    "oneOf of types": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, set()),
    "oneOf with a tag": (
        {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")
            ]
        },
        set(),
    ),
    "two patterns": ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, {("pattern", "/properties/x")}),
    "pattern beside names": (
        {"properties": {"a": {}}, "patternProperties": {"^a": {"type": "string"}}},
        {("patternProperties", "/properties/x")},
    ),
    "names beside properties": (
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 0}},
        {("propertyNames", "/properties/x")},
    ),
    "in a list": ({"items": {"anyOf": [{"type": "integer", "not": {"const": 1}}, {"type": "null"}]}}, {("not", "/properties/x/items/anyOf/0")}),
    "plain": ({"type": "array", "items": {"type": "integer", "minimum": 1, "multipleOf": 3}, "minItems": 2}, set()),
}  # fmt: skip
"""What a grammar cannot hold is left out by name; what it holds is not."""


@pytest.mark.parametrize("name", SERVED)
def test_what_is_not_held_is_named(name):
    schema, expected = SERVED[name]
    relaxed = {}
    prepared = prepare_parameters("t", at_x(schema), relaxed=relaxed)
    assert set(relaxed) == expected
    assert prepared["properties"]["ok"] == {"type": "string"}
    assert not {keyword for keyword, _ in expected} & set(prepared["properties"]["x"]) - {"pattern", "patternProperties"}
    for _, pointer in expected:
        resolve(at_x(schema), pointer)


def test_the_ladder_leaves_out_no_more_than_it_has_to():
    patterns = {
        "properties": {f"p{i}": {"pattern": "^[a-z]{1,900}$", "description": "d"} for i in range(200)}
        | {"n": {"type": "integer", "minimum": 3}}
    }
    relaxed = {}
    prepared = prepare_parameters("t", patterns, relaxed=relaxed)
    assert {keyword for keyword, _ in relaxed} == {"pattern"}
    assert prepared["properties"]["n"] == {"type": "integer", "minimum": 3}
    relaxed = {}
    assert prepare_parameters("t", patterns, rung=99, relaxed=relaxed) == {"type": "object", "additionalProperties": True}
    assert {keyword for keyword, _ in relaxed} == {"properties", "pattern", "type", "minimum"}
    with pytest.raises(GrammarRefused, match="nests too deeply"):
        prepare_parameters("t", nested(1000), rung=99)


def test_parameters_that_are_no_schema_are_refused():
    with pytest.raises(GrammarRefused, match="parameters of tool 't' must be a JSON Schema object, not a list"):
        prepare_parameters("t", [])
    with pytest.raises(GrammarRefused, match="must be an object or a boolean, not a number") as refused:
        prepare_schema(5)
    assert (refused.value.tool, refused.value.pointer) == (None, "")
    with pytest.raises(GrammarRefused, match="allows no value"):
        prepare_schema(False)


def test_a_bad_answer_schema_names_no_tool():
    with pytest.raises(GrammarRefused) as refused:
        HermesFormat().structural_tag([], ToolChoice(), ResponseFormat("json_schema", {"properties": {"a": {"type": "str"}}}))
    assert (refused.value.tool, refused.value.pointer) == (None, "/properties/a/type")
    assert "the response format" in refused.value.message
    assert "did you mean 'string'?" in refused.value.message


def test_schemas_of_tools_that_cannot_be_called_do_not_matter():
    tools = [Tool("fine"), Tool("bad", parameters={"type": "dict"})]
    assert HermesFormat().structural_tag(tools, ToolChoice("none"))
    assert HermesFormat().structural_tag(tools, ToolChoice("named", name="fine"))


def test_long_chains_of_references_are_followed_in_time():
    links = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["x"]} for i in range(CHAIN)
    }
    begun = time.thread_time()
    prepared = prepare_parameters("t", {"$ref": "#/$defs/d0", "$defs": {**links, f"d{CHAIN}": {"type": "object"}}})
    assert len(prepared["$defs"]) == CHAIN + 1
    plain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(CHAIN)}
    uses = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(900)}
    prepared = prepare_parameters("t", {"properties": uses, "$defs": {**plain, f"d{CHAIN}": {"type": "null"}}})
    assert prepared["$defs"] == {"d0": {"type": "null"}}
    assert time.thread_time() - begun < 2.0


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "array", "items": [{"type": "string"}], "additionalItems": False}, {"type": "array", "prefixItems": [{"type": "string"}], "maxItems": 1, "items": False}),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 1}),
        ({"type": "integer", "minimum": 0.5}, {"type": "integer", "minimum": 1}),
        ({"minLength": 1}, {"type": "string", "minLength": 1}),
        ({"minLength": 1, "minimum": 2}, {"type": ["string", "number"], "minLength": 1, "minimum": 2}),
        ({"type": "string", "pattern": "a"}, {"type": "string", "pattern": "^.*a.*$"}),
        ({"type": "string", "pattern": ".*"}, {"type": "string"}),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"allOf": [{"type": "integer"}, {"minimum": 2}, {"minimum": 1}]}, {"type": "integer", "minimum": 2}),
        ({"type": ["integer", "string"], "anyOf": [{"type": "string"}, {"type": "boolean"}]}, {"type": "string"}),
        ({"enum": [1, True, "a"], "type": "integer"}, {"enum": [1]}),
        ({"allOf": [{"enum": [1, True, "b"]}, {"enum": [True, "b"]}]}, {"enum": [True, "b"]}),
        ({"type": "object", "title": "T", "description": "d", "default": {}}, {"type": "object", "additionalProperties": True}),
        ({"type": "string", "description": "d", "not": {"const": "x"}}, {"type": "string"}),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, {"type": "object", "properties": {"a": {}, "b": True}, "required": ["b"]}),
        (True, True),
        ({}, {}),
    ],
)  # fmt: skip
def test_what_xgrammar_would_misread_is_rewritten(schema, expected):
    assert prepare_schema(at_x(schema))["properties"]["x"] == expected


def test_an_open_object_beside_many_names_is_closed():
    few = at_x({"properties": {"ab": {}}, "additionalProperties": True})
    many = at_x({"properties": {f"name{i}": {} for i in range(90)}, "additionalProperties": True})
    assert prepare_schema(few)["properties"]["x"]["additionalProperties"] is True
    assert prepare_schema(many)["properties"]["x"]["additionalProperties"] is False
    wide = GrammarLimits(max_open_prefixes=1_000)
    assert prepare_schema(many, wide)["properties"]["x"]["additionalProperties"] is True


def test_tools_without_parameters_take_an_empty_object():
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    assert prepare_parameters("t", None) == prepare_parameters("t", {}) == empty
    assert prepare_parameters("t", {"type": "object", "properties": {}}) == {"type": "object", "properties": {}}


JUNK = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
KEYWORDS = (
    *("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "items"),
    *(
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
    ),
    *(
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minProperties",
        "maxProperties",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
    ),
    *("nullable", "not", "if", "title", "default"),
)
TYPE_NAMES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])


def schemas(inner):
    named = st.dictionaries(st.sampled_from(["a", "b", "^x"]), inner, max_size=3)
    listed = st.lists(inner, max_size=3)
    sensible = {
        **dict.fromkeys(("type",), TYPE_NAMES | st.lists(TYPE_NAMES, max_size=3)),
        **dict.fromkeys(("enum", "required"), st.lists(JUNK | st.sampled_from(["a", "b"]), max_size=3)),
        **dict.fromkeys(("properties", "patternProperties"), named),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), listed),
        **dict.fromkeys(("additionalProperties", "items", "additionalItems", "propertyNames", "not"), inner),
        "$ref": st.sampled_from(["#", "#/properties/a", "#/$defs/A", "#/$defs/B", "#/nowhere"]),
        "pattern": st.sampled_from(["^a", "b$", "[0-9]{2}", "(", "a|b"]),
    }
    return st.lists(st.sampled_from(KEYWORDS), max_size=5, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: sensible.get(key, st.integers(0, 4)) | JUNK for key in keys})
    )


SCHEMAS = st.recursive(schemas(st.booleans()), lambda inner: schemas(inner | st.booleans()), max_leaves=6)


@settings(max_examples=500, deadline=None)
@given(SCHEMAS, SCHEMAS, SCHEMAS)
def test_any_schema_is_prepared_or_refused(root, first, second):
    root = {**root, "$defs": {"A": first, "B": second}}
    try:
        prepared = prepare_parameters("t", root)
    except GrammarRefused as refused:
        problem = (refused.tool, type(refused.pointer), refused.message[-1] in ".?")
    else:
        problem = None
    if problem is not None:
        assert problem == ("t", str, True)
        return
    json.dumps(prepared)
    assert "allOf" not in json.dumps(prepared)


@pytest.mark.parametrize(
    ("pattern", "size", "text"),
    [
        ("^abc$", 3, "^abc$"),
        ("abc", 3, "^.*abc.*$"),
        ("^a|b$", 2, "^(?:a.*|.*b)$"),
        ("^[a-z]{2,4}$", 4, "^[a-z]{2,4}$"),
        ("(ab){3}", 6, "^.*(ab){3}.*$"),
        ("é", 1, "^.*\\u{e9}.*$"),
        ("", 0, "^.*.*$"),
        ("a\\$", 2, "^.*a\\$.*$"),
    ],
)
def test_patterns_match_whole_strings_and_have_a_size(pattern, size, text):
    info = examine_pattern(pattern)
    assert (info.size, info.text) == (size, text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='ab^$|()[]{}0123,?*+\\.-:<=!épdu"\n', max_size=14))
def test_any_pattern_is_read_or_refused(pattern):
    try:
        info = examine_pattern(pattern)
    except PatternRefused:
        return
    assert info.text.isascii()
    assert info.size >= 0
