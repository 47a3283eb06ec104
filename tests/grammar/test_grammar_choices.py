"""What each choice of tools and each response format allows, as text and along random walks."""

import json
from random import Random

import jsonschema
import pytest
from hermes_walking import HERMES, accepts, check, closed, parsed

from grammar.tools import ResponseFormat, Tool, ToolChoice

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
