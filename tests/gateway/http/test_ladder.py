"""What a grammar does not hold is said before and checked afterwards; every way of asking for an answer's shape."""

import json

import pytest
from fake_dispatcher import Script

from gateway.turn import TurnError

PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer", "not": {"const": 1}}, "b": {"type": "string", "pattern": "^(?=.*x).+$"}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "pair", "parameters": PAIR}}
PLAIN = {"type": "function", "function": {"name": "plain", "parameters": {"type": "object", "properties": {}}}}


def call(arguments, name="pair"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def grammar(gateway):
    return json.loads(gateway.dispatcher.requests[-1]["prompt"].grammar)["format"]


async def test_a_valid_call_carries_the_warning_and_a_broken_one_what_is_wrong(gateway):
    said = "tool pair: checked afterwards instead of enforced: not at /properties/a, pattern at /properties/b"
    gateway.dispatcher.script = Script(call({"a": 2}))
    async with gateway.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    ) as answer:
        assert said in answer.headers["X-Turnkeep-Warning"]
        assert (await answer.json())["warnings"] == [said]
    gateway.dispatcher.script = Script(call({"a": 1, "b": "y"}))
    first, second = (await gateway.chat(tools=[TOOL, PLAIN]))["warnings"]
    assert first == said
    assert second.startswith("call 0 of pair violates its schema: /a: ")
    assert "/b: " in second
    events = await gateway.chat_events(tools=[TOOL])
    assert [event.get("warnings") for event in events[:-1] if event.get("warnings")] == [[first, second]]
    metrics = gateway.telemetry.render_metrics().decode()
    assert 'turnkeep_gateway_schema_keywords_unenforced_total{keyword="not"} 3.0' in metrics
    assert 'turnkeep_gateway_schema_checks_total{result="invalid"} 2.0' in metrics
    assert 'turnkeep_gateway_schema_checks_total{result="valid"} 1.0' in metrics


async def test_what_is_enforced_is_not_checked_nor_warned_of(gateway):
    gateway.dispatcher.script = Script(call({}, "plain"))
    answer = await gateway.chat(tools=[PLAIN])
    assert "warnings" not in answer
    assert gateway.pipeline._checker._process is None


async def test_answers_are_checked_too(gateway):
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": PAIR}}
    gateway.dispatcher.script = Script('{"a": 1}')
    answer = await gateway.chat(response_format=wanted)
    assert answer["warnings"][1].startswith("the answer violates its schema: /a: ")
    gateway.dispatcher.script = Script('{"a": ', finish="length")
    assert len((await gateway.chat(response_format=wanted))["warnings"]) == 1


async def test_a_grammar_that_workers_refuse_is_loosened_by_name_until_they_take_it(gateway):
    gateway.dispatcher.script = Script(call({"a": 2}))
    tool = {**PAIR, "properties": {"a": {"type": "integer", "maximum": 3}, "b": {"type": "string", "pattern": "^x+$"}}}
    tools = [{"type": "function", "function": {"name": "pair", "parameters": tool}}]
    dispatch = gateway.dispatcher.dispatch
    refused = []

    async def picky(**request):
        source = request["prompt"].grammar
        if "pattern" in source or "maximum" in source:
            refused.append(source)
            raise TurnError(400, "invalid_grammar", "The grammar takes too long.", param="grammar")
        return await dispatch(**request)

    gateway.dispatcher.dispatch = picky
    answer = await gateway.chat(tools=tools)
    (warning,) = answer["warnings"]
    assert "maximum at /properties/a" in warning
    assert "pattern at /properties/b" in warning
    assert ["pattern" in source for source in refused] == [True, False]
    assert '"integer"' in gateway.dispatcher.requests[-1]["prompt"].grammar
    await gateway.chat(tools=tools, seed=1)
    assert len(refused) == 2  # remembered

    async def never(**request):
        raise TurnError(400, "invalid_grammar", "The grammar takes too long.", param="grammar")

    gateway.dispatcher.dispatch = never
    error = (await gateway.chat(tools=tools, status=400, seed=2))["error"]
    assert error["code"] == "invalid_grammar"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"guided_regex": "[0-9]+"}, {"type": "regex", "pattern": "[0-9]+"}),
        ({"structured_outputs": {"regex": "a|b"}}, {"type": "regex", "pattern": "a|b"}),
        ({"regex": "a"}, {"type": "regex", "pattern": "a"}),
        ({"guided_grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"ebnf": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"guided_choice": ["yes"]}, {"type": "const_string", "value": "yes"}),
        (
            {"structured_outputs": {"choice": ["yes", "no"], "json": None}},
            {"type": "or", "elements": [{"type": "const_string", "value": text} for text in ("yes", "no")]},
        ),
    ],
)
async def test_shapes_of_an_answer(gateway, body, wanted):
    await gateway.chat(**body)
    assert grammar(gateway) == wanted
    if "ebnf" not in body:
        await gateway.json("/v1/completions", {"prompt": "x", **body})
        assert grammar(gateway) == wanted


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a{0,5000}"}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a" * 5000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 3]}, "guided_choice[1]"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"ebnf": "no rules"}, "ebnf"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "/tools/1/function/name"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
    ],
)
async def test_bad_shapes_are_named(gateway, body, field):
    error = (await gateway.chat(status=400, **body))["error"]
    assert error["param"] == field, error


async def test_at_most_so_many_calls(gateway):
    gateway.dispatcher.script = Script("\n".join(call({}, "plain") for _ in range(4)))
    answer = await gateway.chat(tools=[PLAIN], max_tool_calls=2)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 2
    assert '"repeat"' in json.dumps(grammar(gateway))


async def test_a_caller_waits_for_few_refusals_however_long_the_ladder_is(gateway):
    """Every rung leaves out something, and what stays heavy on all of them are 500 optional properties."""
    gateway.dispatcher.script = Script("{}")
    properties = {f"p{number}": {} for number in range(500)} | {
        "pattern": {"type": "string", "pattern": "^[a-z]{1,300}$"},
        "count": {"type": "string", "maxLength": 900},
        "enum": {"enum": [1, 2, 3]},
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    dispatch = gateway.dispatcher.dispatch
    refused = []

    async def picky(**request):
        if "p499" in request["prompt"].grammar:
            refused.append(request["prompt"].grammar)
            raise TurnError(400, "invalid_grammar", "The grammar takes too long.", param="grammar")
        return await dispatch(**request)

    gateway.dispatcher.dispatch = picky
    answer = await gateway.chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert [("pattern" + '":"^' in source, '"enum":[' in source) for source in refused] == [(True, True), (False, True)]
    assert "properties" in answer["warnings"][0]
