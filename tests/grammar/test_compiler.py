"""Compiled grammars: random walks through the token masks, every choice, real schemas, the cache and the probe."""

import itertools
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from random import Random

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import grammar.compiler as compiler_module
from grammar.compiler import GrammarCompiler, allocate_bitmask
from grammar.counted import PLAIN_AS_WRITTEN, count_characters
from grammar.deltas import TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from grammar.formats.hermes import HermesFormat
from grammar.limits import DEFAULT_LIMITS, GrammarLimits
from grammar.lowering import ESCAPE_RULE
from grammar.schema import UNENFORCED, prepare_parameters
from grammar.tools import GrammarRefused, ResponseFormat, Tool, ToolChoice

HERMES = HermesFormat()
SCHEMAS = Path(__file__).parents[3] / "shared" / "data" / "tool_schemas"
STOPS = (2, 0)
LOGITS = 49_216
"""A little wider than the vocabulary, as padded heads are."""


@pytest.fixture(scope="module")
def tokenizer_json(smollm2_dir):
    return smollm2_dir / "tokenizer.json"


@pytest.fixture(scope="module")
def compiler(tokenizer_json):
    torch.set_num_threads(1)
    made = GrammarCompiler(tokenizer_json, LOGITS, STOPS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def walker(tokenizer_json):
    return Walker(Tokenizer.from_file(str(tokenizer_json)))


class Walker:
    """Generates by chance what a grammar allows, with a liking for tokens that bring the text to its end."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        quotes = ('"', '"}', '"]', '"}}', '",')
        closing = ("}", "]", "}}", "\n", "</")
        self.quotes = {token_id for token in quotes for token_id in tokenizer.encode(token).ids}
        helpful = ("0", "1", "9", ":", "/", ".", "-", "a", "A", "x")  # what patterns and formats ask for
        self.helpful = {token_id for token in helpful for token_id in tokenizer.encode(token).ids}
        self.closing = {token_id for token in closing for token_id in tokenizer.encode(token).ids} | set(STOPS)
        self.mask = allocate_bitmask(1, LOGITS)

    def allowed(self, matcher):
        matcher.fill_bitmask(self.mask, 0)
        return np.nonzero(np.unpackbits(self.mask.numpy().view(np.uint8), bitorder="little"))[0].tolist()

    def choose(self, allowed, random, hurry):
        for kind, chance in ((self.quotes, hurry), (self.helpful, 0.3), (self.closing, hurry)):
            liked = [token_id for token_id in allowed if token_id in kind]
            if liked and random.random() < chance:
                return random.choice(liked)
        return random.choice(allowed)

    def walk(self, matcher, random, prompt=(), most=2_000):
        """The text of a whole generation that begins with the tokens `prompt`."""
        ids = list(prompt)
        for token_id in ids:
            assert matcher.accept(token_id)
        while len(ids) < most:
            allowed = self.allowed(matcher)
            assert allowed, f"a dead end after {self.tokenizer.decode(ids)!r}"
            assert allowed[-1] < LOGITS
            token_id = self.choose(allowed, random, min(0.4 + len(ids) / 400, 0.85))
            assert matcher.accept(token_id)
            if token_id in STOPS:
                assert matcher.is_terminated()
                assert self.allowed(matcher) == sorted(STOPS)
                assert not matcher.accept(token_id)
                return self.tokenizer.decode(ids)
            ids.append(token_id)
        raise AssertionError(f"no end after {most} tokens: {self.tokenizer.decode(ids)[:300]!r}")


def parsed(tools, choice, text):
    """(text, [(name, arguments)]) of a generation; every call is complete."""
    numbers = itertools.count()
    parser = HERMES.parser(tools, choice, lambda: f"c{next(numbers)}")
    calls, said = [], ""
    for delta in [*parser.feed(text), *parser.finish()]:
        if isinstance(delta, ToolCallStart):
            calls.append([delta.name, ""])
        elif isinstance(delta, ToolCallArguments):
            calls[-1][1] += delta.text
        elif isinstance(delta, ToolCallEnd):
            assert delta.complete
        else:
            assert isinstance(delta, TextDelta)
            said += delta.text
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


def accepts(compiled, tokenizer, text):
    """Whether the text may be generated to its end."""
    matcher = compiled.matcher()
    return all(matcher.accept(token_id) for token_id in tokenizer.encode(text).ids) and matcher.accept(STOPS[0])


def closed(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


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


def draft_2020(schema):
    """Older spellings that jsonschema does not read, as the drafts of their time mean them."""
    if isinstance(schema, list):
        return [draft_2020(child) for child in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: draft_2020(child) for key, child in schema.items()}
    if isinstance(out.get("exclusiveMinimum"), bool):
        out["exclusiveMinimum"] = out.pop("minimum")
    if out.pop("nullable", False) is True:
        out = {"anyOf": [out, {"type": "null"}]}
    return out


def check(schema, arguments):
    jsonschema.Draft202012Validator(draft_2020(schema or closed())).validate(arguments)


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


def flattened(value):
    yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from flattened(child)


def real_tools():
    """Server or file name -> its tools."""
    if not SCHEMAS.is_dir():
        pytest.skip("The real tool schemas are not on this machine (../shared/data/tool_schemas).")
    servers = {}
    for path in sorted([*(SCHEMAS / "mcp").glob("*.json"), *(SCHEMAS / "nasty").glob("*.json")]):
        value = json.loads(path.read_text())
        listed = value.get("tools", [value]) if isinstance(value, dict) else value
        servers[path.stem] = [Tool(tool["name"], tool.get("description"), tool.get("inputSchema")) for tool in listed]
    return servers


def test_every_real_tool_is_accepted_alone_and_every_list_as_one(compiler):
    servers = real_tools()
    tools = {(tool.name, json.dumps(tool.parameters)): tool for listed in servers.values() for tool in listed}
    assert len(tools) > 300
    for tool in tools.values():
        compiler.compile(HERMES.structural_tag([tool]))
    for listed in servers.values():
        compiler.compile(HERMES.structural_tag(listed))


def test_random_calls_of_real_tools_are_valid(compiler, walker):
    done = 0
    for server, tools in real_tools().items():
        by_name = {tool.name: tool for tool in tools}
        choice = ToolChoice("required")
        compiled = compiler.compile(HERMES.structural_tag(tools, choice))
        for seed in range(2 if len(tools) == 1 else 8):
            _, calls = parsed(tools, choice, walker.walk(compiled.matcher(), Random(f"{server} {seed}"), most=6_000))
            for name, arguments in calls:
                done += 1
                if not keywords_of(by_name[name].parameters) & UNENFORCED:
                    check(by_name[name].parameters, arguments)
    assert done > 200


def keywords_of(schema):
    return {key for value in flattened(schema or {}) if isinstance(value, dict) for key in value}


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


TOOLS = (
    Tool("get", parameters=closed(city={"type": "string"})),
    Tool("ping"),
    Tool("put", parameters=closed(n={"type": "integer"})),
)
GET = '<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
JSON = '{"a": 1}'
ANSWER = ResponseFormat("json_schema", closed(a={"type": "integer"}))
TEXTS = {
    "empty": "",
    "text": "Hello, 漢字 😀.",
    "text call": "I look.\n" + GET,
    "call": GET,
    "calls": GET + "\n" + PING,
    "call text": GET + "\nDone.",
    "call spaced": GET.replace('": {', '":{'),
    "call unknown": GET.replace("get", "got"),
    "call invalid": GET.replace('"Paris"', "5"),
    "call cut": GET[:-5],
    "json": JSON,
    "json call": JSON + PING,
    "json invalid": '{"b": 1}',
}
EVERYTHING = {"empty", "text", "text call", "call", "calls"}
CHOICES = [
    (ToolChoice("auto"), ResponseFormat(), {*EVERYTHING, "json", "json invalid", "json call"}),
    (ToolChoice("auto", parallel=False), ResponseFormat(), {*EVERYTHING, "json", "json invalid", "json call"} - {"calls"}),
    (ToolChoice("auto", allowed=("ping",)), ResponseFormat(), {"empty", "text", "json", "json invalid", "json call"}),
    (ToolChoice("none"), ResponseFormat(), {"empty", "text", "json", "json invalid"}),
    (ToolChoice("required"), ResponseFormat(), {"call", "calls"}),
    (ToolChoice("required", parallel=False), ResponseFormat(), {"call"}),
    (ToolChoice("required", allowed=("ping", "put")), ResponseFormat(), set()),
    (ToolChoice("named", name="get"), ResponseFormat(), {"call"}),
    (ToolChoice("named", name="put"), ANSWER, set()),
    (ToolChoice("required"), ANSWER, {"call", "calls"}),
    (ToolChoice("auto"), ANSWER, {"call", "calls", "json"}),
    (ToolChoice("auto", parallel=False), ANSWER, {"call", "json"}),
    (ToolChoice("none"), ANSWER, {"json"}),
    (ToolChoice("none"), ResponseFormat("json_object"), {"json", "json invalid"}),
    (ToolChoice("auto"), ResponseFormat("json_object"), {"call", "calls", "json", "json invalid"}),
]


@pytest.mark.parametrize(("choice", "answer", "expected"), CHOICES)
def test_every_choice_allows_what_it_says(compiler, walker, choice, answer, expected):
    compiled = compiler.compile(HERMES.structural_tag(TOOLS, choice, answer))
    assert {name for name, text in TEXTS.items() if accepts(compiled, walker.tokenizer, text)} == expected


@pytest.mark.parametrize(
    ("choice", "least", "most"),
    [
        (ToolChoice("required"), 1, 99),
        (ToolChoice("required", parallel=False), 1, 1),
        (ToolChoice("named", name="put"), 1, 1),
        (ToolChoice("none"), 0, 0),
        (ToolChoice("auto", allowed=("ping",)), 0, 99),
    ],
)
def test_random_generations_have_the_calls_of_their_choice(compiler, walker, choice, least, most):
    compiled = compiler.compile(HERMES.structural_tag(TOOLS, choice))
    allowed = {choice.name} if choice.mode == "named" else set(choice.allowed or ("get", "ping", "put"))
    for seed in range(10):
        text = walker.walk(compiled.matcher(), Random(seed))
        said, calls = parsed(TOOLS, choice, text)
        assert least <= len(calls) <= most
        assert {name for name, _ in calls} <= allowed
        assert least == 0 or said == ""
        assert choice.mode != "none" or "<tool_call>" not in text


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_begins_in_free_text_ends_valid(compiler, walker, parallel):
    choice = ToolChoice("auto", parallel=parallel)
    compiled = compiler.compile(HERMES.structural_tag(TOOLS, choice))
    prompt = walker.tokenizer.encode("I will call a tool. <tool_call>").ids
    counts = set()
    for seed in range(15):
        said, calls = parsed(TOOLS, choice, walker.walk(compiled.matcher(), Random(seed), prompt))
        assert said == "I will call a tool."
        counts.add(len(calls))
        for name, arguments in calls:
            check(next(tool for tool in TOOLS if tool.name == name).parameters, arguments)
    assert 1 in counts
    assert (max(counts) > 1) == parallel


@pytest.mark.parametrize("answer", [ANSWER, ResponseFormat("json_object"), ResponseFormat("json_schema", True)])
def test_random_answers_are_json(compiler, walker, answer):
    compiled = compiler.compile(HERMES.structural_tag([], ToolChoice(), answer))
    for seed in range(15):
        value = json.loads(walker.walk(compiled.matcher(), Random(seed)))
        jsonschema.validate(value, {"type": "object"} if answer.kind == "json_object" else answer.schema)


def test_special_tokens_are_never_part_of_a_string(compiler, walker):
    compiled = compiler.compile(HERMES.structural_tag(TOOLS, ToolChoice("named", name="get")))
    matcher = compiled.matcher()
    for token_id in walker.tokenizer.encode('<tool_call>\n{"name": "get", "arguments": {"city": "').ids:
        assert matcher.accept(token_id)
    special = {token_id for token_id, token in walker.tokenizer.get_added_tokens_decoder().items() if token.special}
    assert not special & set(walker.allowed(matcher))
    assert not any(matcher.accept(token_id) for token_id in special)
    assert matcher.accept(walker.tokenizer.encode("Rome").ids[0])


def test_a_fork_goes_its_own_way(compiler, walker):
    compiled = compiler.compile(HERMES.structural_tag(TOOLS, ToolChoice("named", name="put")))
    trunk = compiled.matcher()
    for token_id in walker.tokenizer.encode('<tool_call>\n{"name": "put", "arguments": {"n": ').ids:
        assert trunk.accept(token_id)
    forks = [trunk.fork() for _ in range(3)]
    before = walker.allowed(trunk)
    texts = [walker.walk(fork, Random(seed)) for seed, fork in enumerate(forks)]
    assert walker.allowed(trunk) == before
    assert not trunk.is_terminated()
    assert all(fork.is_terminated() and fork.is_completed() for fork in forks)
    for text in texts:
        assert text.endswith("}}\n</tool_call>")
        int(text.removesuffix("}}\n</tool_call>"))


def test_a_refused_token_leaves_the_state(compiler, walker):
    matcher = compiler.compile(HERMES.structural_tag(TOOLS, ToolChoice("required"))).matcher()
    before = walker.allowed(matcher)
    assert not matcher.accept(walker.tokenizer.encode("Hello").ids[0])
    assert not matcher.accept(STOPS[0])
    assert walker.allowed(matcher) == before
    assert not matcher.is_completed()


def test_a_mask_row_leaves_the_others_alone(compiler):
    mask = allocate_bitmask(3, LOGITS)
    assert mask.shape == (3, LOGITS // 32)
    compiler.compile(HERMES.structural_tag(TOOLS, ToolChoice("required"))).matcher().fill_bitmask(mask, 1)
    assert (mask[0] == -1).all()
    assert (mask[2] == -1).all()
    assert not (mask[1] == -1).any()


def test_stop_tokens_of_any_bit_are_allowed_at_the_end(tokenizer_json):
    stops = (31, 0, 63)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, stops)
    matcher = compiler.compile('{"type":"structural_tag","format":{"type":"const_string","value":"a"}}').matcher()
    mask = allocate_bitmask(1, LOGITS)
    assert matcher.accept(Tokenizer.from_file(str(tokenizer_json)).encode("a").ids[0])
    for _ in range(2):
        matcher.fill_bitmask(mask, 0)
        bits = np.nonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))[0]
        assert bits.tolist() == [0, 31, 63]
        matcher.accept(31)
    assert matcher.is_terminated()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "must be a structural tag"),
        ('{"type": "structural_tag"}', "must be a structural tag"),
        ('{"type": "structural_tag", "format": {"type": "nonsense"}}', "cannot be compiled"),
        ('{"type": "structural_tag", "format": {"type": "json_schema"}}', "json_schema without a schema"),
        ('{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": false}}', "allows no value"),
        (
            '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"title": "t", "type": "dict"}}}',
            "tool 't'",
        ),
        ('{"type": "structural_tag", "format": ' + '{"a": ' * 400 + "{}" + "}" * 400 + "}", "nests more than 64 formats"),
        ('{"type": "structural_tag", "format": ' + "[" * 100_000, "not valid JSON"),
        ("x" * (DEFAULT_LIMITS.max_source_bytes + 1), "at most 8388608 are allowed"),
    ],
)
def test_sources_that_are_no_grammars_are_refused(compiler, source, words):
    for _ in range(2):  # the second answer comes from the cache
        with pytest.raises(GrammarRefused) as refused:
            compiler.compile(source)
        assert words in refused.value.message
        assert refused.value.message[-1] in ".?"


def test_what_xgrammar_writes_is_what_is_rewritten():
    """The one-spelling rules replace rules of XGrammar's by their text; another version may write others."""
    import xgrammar

    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string", "maxLength": 3}}}
    ebnf = str(xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, separators=(", ", ": ")))
    assert ESCAPE_RULE in ebnf
    assert PLAIN_AS_WRITTEN in ebnf
    assert "counted_0_3" in count_characters(ebnf)


def source_for(i):
    return HERMES.structural_tag([Tool(f"tool{i}", parameters=closed(a={"type": "integer"}))])


def test_the_cache_is_bounded(tokenizer_json, monkeypatch):
    limits = GrammarLimits(cache_entries=4)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS, limits)
    first = compiler.compile(source_for(0))
    for i in range(1, 4):
        compiler.compile(source_for(i))
    assert compiler.compile(source_for(0)) is first  # used again, so it outlives the others
    for i in range(4, 7):
        compiler.compile(source_for(i))
    assert compiler.compile(source_for(0)) is first
    with pytest.raises(GrammarRefused):
        compiler.compile("no grammar")
    compiler.compile(source_for(7))
    compiler.compile(source_for(8))
    compiler.compile(source_for(9))
    assert compiler.compile(source_for(0)) is not first
    small = GrammarCompiler(tokenizer_json, LOGITS, STOPS, GrammarLimits(cache_bytes=1))
    again = small.compile(source_for(0))
    assert again.memory_bytes > 1
    assert small.compile(source_for(0)) is not again


def test_one_source_is_compiled_once_for_all_threads(tokenizer_json, monkeypatch):
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS)
    started, release, lowered = threading.Event(), threading.Event(), []
    lower = compiler_module.lower

    def slow_lower(parsed_source, *rest):
        lowered.append(parsed_source)
        started.set()
        assert release.wait(20)
        return lower(parsed_source, *rest)

    monkeypatch.setattr(compiler_module, "lower", slow_lower)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(compiler.compile(source_for(0)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert started.wait(20)
    release.set()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 8
    assert len({id(answer) for answer in answers}) == 1
    assert len(lowered) == 1


def test_an_error_that_is_no_refusal_is_not_remembered(tokenizer_json, monkeypatch):
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS)
    lower = compiler_module.lower
    monkeypatch.setattr(compiler_module, "lower", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        compiler.compile(source_for(0))
    monkeypatch.setattr(compiler_module, "lower", lower)
    assert compiler.compile(source_for(0)).memory_bytes > 0


RUNAWAY = closed(a={"type": "string", "pattern": "^([a-z0-9]{0,30}-){0,30}$"})
"""Takes XGrammar far longer than the deadline below."""


def children_of(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in listed.stdout.split()]


def test_a_runaway_compile_is_killed_and_refused(tokenizer_json):
    limits = GrammarLimits(probe_deadline_seconds=0.5, cheap_milliseconds=200.0)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS, limits)
    try:
        source = HERMES.structural_tag([Tool("slow", parameters=RUNAWAY)], ToolChoice("required"))
        with pytest.raises(GrammarRefused, match=r"takes more than 0\.5 seconds to compile; send fewer or simpler tools\.$"):
            compiler.compile(source)
        helper = compiler._prober._helper._process
        assert children_of(helper.pid) == []
        begun = time.monotonic()
        with pytest.raises(GrammarRefused, match=r"0\.5 seconds"):
            compiler.compile(source)  # remembered
        assert time.monotonic() - begun < 0.4
        # What needs a trial and passes it is compiled.
        middling = HERMES.structural_tag(
            [Tool("middling", parameters=closed(a={"type": "string", "pattern": "^[a-z]{0,20}$"}))]
        )
        assert compiler.compile(middling).memory_bytes > 0
    finally:
        compiler.close()
    assert helper.poll() is not None
    compiler.close()


def test_a_probe_that_dies_is_no_answer_and_is_started_again(tokenizer_json):
    limits = GrammarLimits(probe_deadline_seconds=30.0, cheap_milliseconds=0.0)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS, limits)
    try:
        compiler.compile(source_for(0))
        helper = compiler._prober._helper._process
        outcome = []

        def ask():
            try:
                compiler.compile(HERMES.structural_tag([Tool("slow", parameters=RUNAWAY)]))
            except GrammarRefused as refused:
                outcome.append(refused.message)

        thread = threading.Thread(target=ask)
        thread.start()
        deadline = time.monotonic() + 20
        while not (running := children_of(helper.pid)) and time.monotonic() < deadline:
            thread.join(0.05)
        helper.kill()
        thread.join(20)
        for pid in running:  # orphaned by the kill, which close() would not have done
            os.kill(pid, 9)
        assert outcome == ["The grammar could not be tried: the process that tries grammars died; send the request again."]
        assert len(compiler._known) == 1
        assert compiler.compile(source_for(1)).memory_bytes > 0
        assert compiler._prober._helper._process.pid != helper.pid
    finally:
        compiler.close()
    with pytest.raises(GrammarRefused, match="the engine is stopping"):
        compiler.compile(source_for(2))


def test_closing_ends_a_trial_that_runs(tokenizer_json):
    limits = GrammarLimits(probe_deadline_seconds=60.0, cheap_milliseconds=0.0)
    compiler = GrammarCompiler(tokenizer_json, LOGITS, STOPS, limits)
    compiler.compile(source_for(0))
    helper = compiler._prober._helper._process
    refused = []

    def ask():
        try:
            compiler.compile(HERMES.structural_tag([Tool("slow", parameters=RUNAWAY)]))
        except GrammarRefused as error:
            refused.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 20
    while not (running := children_of(helper.pid)) and time.monotonic() < deadline:
        thread.join(0.05)
    compiler.close()
    thread.join(10)
    assert len(refused) == 1
    assert helper.poll() is not None
    assert running
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)


def test_the_prepared_schema_is_prepared_already():
    """The worker prepares again what the gateway prepared; that must change nothing."""
    for name, schema in ENFORCED.items():
        once = prepare_parameters("t", schema)
        again = prepare_parameters("t", once)
        if "$defs" not in once:
            assert again == once, name
        else:
            assert len(again["$defs"]) == len(once["$defs"]), name
