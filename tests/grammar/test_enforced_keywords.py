"""Keywords that a grammar holds: random walks through token masks are valid against the schema, and spelled in one way."""

import json
import time
from random import Random

import pytest
from hermes_walking import HERMES, accepts, check, closed, parsed

from grammar.counted import PLAIN_AS_WRITTEN, count_characters
from grammar.lowering import ESCAPE_RULE
from grammar.schema import prepare_parameters
from grammar.tools import ResponseFormat, Tool, ToolChoice

NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"allOf": [{"$ref": "#/$defs/Node"}], "description": "pydantic's way"},
    },
    "required": ["value"],
}
ENFORCED = {
    "none": None,
    "scalars": closed(
        a={"type": "string"}, b={"type": "boolean"}, c={"type": "null"}, d={"type": "integer"}, e={"type": "number"}
    ),
    "optional": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]},
    "types": closed(a={"type": ["string", "null"]}, b={"type": "integer", "nullable": True}),
    "enums": closed(
        a={"enum": ["x", 'quo"te', "é", 5, None, True, {"k": [1]}]}, b={"const": "only"}, c={"type": "string", "enum": ["p"]}
    ),
    "nullable enum": closed(a={"type": "string", "enum": ["x"], "nullable": True}),
    "strings": closed(
        a={"type": "string", "minLength": 2, "maxLength": 9},
        b={"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$"},
        c={"type": "string", "pattern": "[0-9]"},
        d={"pattern": "^a|1$"},
    ),
    "formats": closed(
        a={"type": "string", "format": "date-time"}, b={"type": "string", "format": "uuid"}, c={"format": "ipv4"}
    ),
    "integers": closed(
        a={"type": "integer", "minimum": -3, "maximum": 12},
        b={"type": "integer", "exclusiveMinimum": 0},
        c={"minimum": 0, "exclusiveMinimum": True, "type": "integer", "maximum": 7},
        d={"type": "integer", "multipleOf": 5},
        e={"type": "integer", "minimum": 0.5, "maximum": 1.5},
    ),
    "numbers": closed(a={"type": "number", "minimum": 0, "maximum": 1}, b={"exclusiveMaximum": -2}, c={"minimum": 2.5}),
    "arrays": closed(
        a={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        b={"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False, "minItems": 2},
        c={"type": "array"},
    ),
    "objects": closed(
        a={"type": "object"},
        b={"type": "object", "additionalProperties": {"type": "integer"}},
        c={"type": "object", "properties": {"k": {"type": "boolean"}}, "additionalProperties": {"type": "string"}},
        d={"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
        e={"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        f={"type": "object", "properties": {"p": {}, "q": {}, "r": {}}, "minProperties": 2},
        g={"type": "object", "required": ["named"]},
    ),
    "anyOf": closed(
        a={"anyOf": [{"type": "integer"}, closed(x={"type": "string"})]}, b={"type": "string", "anyOf": [{"maxLength": 3}]}
    ),
    "beside anyOf": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 4}, "b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "allOf with typed rest": {
        "allOf": [
            {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
            {"properties": {"b": {"maxLength": 2}}, "required": ["b"]},
        ]
    },
    "families without type": closed(a={"minimum": 3, "maxLength": 2}, b={"items": {"type": "null"}, "required": ["z"]}),
    "references": {
        "$defs": {"Node": NODE},
        **closed(list={"$ref": "#/$defs/Node"}, other={"allOf": [{"$ref": "#/$defs/Node"}]}),
    },
    "reference beside constraints": {
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "n": {"$ref": "#/$defs/Node", "required": ["v"]}},
            }
        },
        **closed(start={"$ref": "#/$defs/Node", "required": ["n"]}),
    },
    "shared branches": {
        "$defs": {"A": closed(a={"type": "null"}), "B": {"allOf": [{"$ref": "#/$defs/A"}]}},
        **closed(x={"type": "object", "anyOf": [{"$ref": "#/$defs/B"}, {"$ref": "#/$defs/A"}]}),
    },
    "root reference": {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
    "odd names": closed(
        **{'quo"te\\': {"type": "null"}, "é 😀": {"type": "null"}, "": {"type": "null"}, "</tool_call>": {"type": "null"}}
    ),
}


ONE_SPELLING = ("none", "strings", "formats", "odd names", "shared branches")
"""Without numbers (-0), free objects (the same name twice) and objects in an enum (no spaces)."""


@pytest.mark.parametrize("name", ENFORCED)
def test_random_calls_are_valid_for_enforced_keywords(compiler, walker, name):
    tools = [Tool("the.tool", parameters=ENFORCED[name])]
    choice = ToolChoice("named", name="the.tool")
    compiled = compiler.compile(HERMES.structural_tag(tools, choice))
    for seed in range(8):
        text = walker.walk(compiled.matcher(), Random(f"{name} {seed}"))
        said, calls = parsed(tools, choice, text)
        assert said == ""
        assert [called for called, _ in calls] == ["the.tool"]
        check(ENFORCED[name], calls[0][1])
        # One spelling: what comes back in a history is rendered as it was generated.
        if name in ONE_SPELLING:
            assert HERMES.render_calls("", calls) == text


def accepted_strings(compiler, tokenizer, limits, texts):
    schema = closed(x={"type": "string", **limits})
    compiled = compiler.compile(HERMES.structural_tag([], ToolChoice(), ResponseFormat("json_schema", schema)))
    return {text for text in texts if accepts(compiled, tokenizer, json.dumps({"x": text}, ensure_ascii=False))}


@pytest.mark.parametrize(
    "limits",
    [
        *(
            {"maxLength": 0},
            {"maxLength": 1},
            {"minLength": 1, "maxLength": 1},
            {"minLength": 3, "maxLength": 3},
            {"minLength": 1},
        ),
        *({"minLength": 4}, {"maxLength": 2}, {"minLength": 2, "maxLength": 5}, {"minLength": 0}, {"maxLength": 20}),
    ],
)
def test_lengths_count_characters_whether_escaped_or_not(compiler, walker, limits):
    texts = [
        "",
        "a",
        "é",
        "\n",
        '"',
        "😀",
        "ab",
        "\t\\",
        'a"b',
        "\x01\n\x1f",
        "漢字漢字",
        "a\nb\nc",
        "a" * 6,
        '"' * 20,
        "a" * 21,
    ]
    least, most = limits.get("minLength", 0), limits.get("maxLength", 99)
    expected = {text for text in texts if least <= len(text) <= most}
    assert accepted_strings(compiler, walker.tokenizer, limits, texts) == expected


def test_long_lengths_are_held_and_very_long_ones_are_not(compiler, walker):
    texts = ["a" * size for size in (199, 200, 201, 1024, 1025, 1500)] + ["line\n" * 20]
    assert accepted_strings(compiler, walker.tokenizer, {"maxLength": 200}, texts) == set(texts[:2])
    assert accepted_strings(compiler, walker.tokenizer, {"maxLength": 1024}, texts) == set(texts[:4])
    assert accepted_strings(compiler, walker.tokenizer, {"maxLength": 1025}, texts) == set(texts)
    assert accepted_strings(compiler, walker.tokenizer, {"minLength": 200}, texts) == set(texts[1:6])


def test_a_length_limit_does_not_make_masks_slow(compiler, walker):
    """A counted repetition that holds escapes takes 50 to 200 ms for each; this takes some 30 microseconds."""
    schema = closed(
        **{f"p{i}": {"type": "string", "minLength": 1, "maxLength": most} for i, most in enumerate((9, 100, 900, 9_000))}
    )
    compiled = compiler.compile(HERMES.structural_tag([], ToolChoice(), ResponseFormat("json_schema", schema)))
    matcher = compiled.matcher()
    spent = []
    text = json.dumps({f"p{i}": "abcdefg" for i in range(4)})
    for token_id in walker.tokenizer.encode(text).ids:
        begun = time.thread_time()
        matcher.fill_bitmask(walker.mask, 0)
        spent.append(time.thread_time() - begun)
        assert matcher.accept(token_id)
    assert sum(spent) / len(spent) < 0.01


def test_what_xgrammar_writes_is_what_is_rewritten():
    """The one-spelling rules replace rules of XGrammar's by their text; another version may write others."""
    import xgrammar

    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string", "maxLength": 3}}}
    ebnf = str(xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, separators=(", ", ": ")))
    assert ESCAPE_RULE in ebnf
    assert PLAIN_AS_WRITTEN in ebnf
    assert "counted_0_3" in count_characters(ebnf)


def test_the_prepared_schema_is_prepared_already():
    """The worker prepares again what the gateway prepared; that must change nothing."""
    for name, schema in ENFORCED.items():
        once = prepare_parameters("t", schema)
        again = prepare_parameters("t", once)
        if "$defs" not in once:
            assert again == once, name
        else:
            assert len(again["$defs"]) == len(once["$defs"]), name
