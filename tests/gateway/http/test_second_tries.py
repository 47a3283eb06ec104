"""Calls that violate their schema are generated once more, where that was asked for and nobody has read them."""

import json

import pytest
from fake_dispatcher import Script
from gateway_harness import run_gateway

from gateway.config import HttpConfig
from gateway.turn import TurnError
from grammar.checking.checker import CheckLimits

CODE = {"type": "string", "pattern": "^(?=.*x).+$"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "not": {"const": 1}}, "b": CODE, "kind": {"enum": ["p", "q"]}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "pair", "parameters": SCHEMA}}


def call(arguments):
    return f'<tool_call>\n{{"name": "pair", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture
async def gateway(tiny_model):
    async with run_gateway(tiny_model, second_tries=True) as made:
        made.pipeline._checker._limits = CheckLimits(seconds=60.0)  # its process may take long to start on a busy machine
        yield made


def scripted(gateway, first, *again):
    """The first generation writes one thing, the ones after it others."""
    gateway.dispatcher.script = Script(first)
    dispatch = gateway.dispatcher.dispatch
    left = list(again)

    async def in_turn(**request):
        if "-again-" in request["request_id"]:
            script = left.pop(0)
            if isinstance(script, TurnError):
                raise script
            gateway.dispatcher.script = script if isinstance(script, Script) else Script(script)
        return await dispatch(**request)

    gateway.dispatcher.dispatch = in_turn


def result(gateway):
    metrics = gateway.telemetry.render_metrics().decode()
    lines = [line for line in metrics.splitlines() if line.startswith("turnkeep_gateway_second_tries_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


async def test_an_optional_part_is_left_out_and_the_answer_replaced(gateway):
    scripted(gateway, call({"a": 2, "b": "y"}), call({"a": 3, "kind": "q"}))
    answer = await gateway.chat(tools=[TOOL])
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": 3, "kind": "q"}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["warnings"][1].startswith("call 0 of pair violates its schema: /b: ")
    assert answer["warnings"][1].endswith("; it was generated once more, and is valid now")
    first, second = (request["prompt"] for request in gateway.dispatcher.requests)
    assert second.packed_token_ids == first.packed_token_ids
    assert '"b"' in first.grammar
    assert '"b"' not in second.grammar
    assert gateway.dispatcher.requests[1]["sampling"].n == 1
    tokens = [len(gateway.dispatcher.tokenizer.encode(call(one)).ids) for one in ({"a": 2, "b": "y"}, {"a": 3, "kind": "q"})]
    assert answer["usage"]["completion_tokens"] == sum(tokens) + 2  # and what ends each
    assert result(gateway) == {"valid": 1.0}
    assert gateway.dispatcher.open == 0


async def test_a_required_value_is_ruled_out(gateway):
    scripted(gateway, call({"a": 1}), call({"a": 5}))
    answer = await gateway.chat(tools=[TOOL])
    assert '{"a": 5}' in answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    grammar = gateway.dispatcher.requests[1]["prompt"].grammar
    assert '"maximum":0' in grammar
    assert '"minimum":2' in grammar


@pytest.mark.parametrize(
    ("again", "how"),
    [
        (call({"a": 1}), "invalid"),
        ("No call.", "invalid"),
        (Script(call({"a": 5})[:-14], finish="length"), "invalid"),
        (TurnError(503, "overloaded", "Later."), "failed"),
        (Script(call({"a": 5}), late_error=TurnError(502, "worker_error", "Gone.")), "failed"),
    ],
)
async def test_what_is_no_better_is_not_taken(gateway, again, how):
    scripted(gateway, call({"a": 1}), again)
    answer = await gateway.chat(tools=[TOOL])
    assert json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert answer["warnings"][1].startswith("call 0 of pair violates its schema: /a: ")
    assert "once more" not in answer["warnings"][1]
    assert result(gateway) == {how: 1.0}
    assert gateway.dispatcher.open == 0


async def test_only_the_choice_that_is_wrong_is_generated_again(gateway):
    scripted(gateway, call({"a": 1}), call({"a": 7}), call({"a": 1}))
    answer = await gateway.chat(tools=[TOOL], n=2)
    made = [choice["message"]["tool_calls"][0]["function"]["arguments"] for choice in answer["choices"]]
    assert [json.loads(arguments) for arguments in made] == [{"a": 7}, {"a": 1}]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert result(gateway) == {"valid": 1.0, "invalid": 1.0}


async def test_what_violates_as_a_whole_has_no_part_to_leave_out(gateway):
    whole = {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}}
    scripted(gateway, call({"a": 1}))
    answer = await gateway.chat(tools=[{"type": "function", "function": {"name": "pair", "parameters": whole}}])
    assert answer["warnings"][1].startswith("call 0 of pair violates its schema: the value: ")
    assert result(gateway) == {"impossible": 1.0}
    assert len(gateway.dispatcher.requests) == 1


async def test_streams_and_gateways_that_were_not_asked_only_warn(gateway, tiny_model):
    scripted(gateway, call({"a": 1}))
    events = await gateway.chat_events(tools=[TOOL])
    (warnings,) = [event["warnings"] for event in events[:-1] if event.get("warnings")]
    assert warnings[1].startswith("call 0 of pair violates its schema")
    assert result(gateway) == {}
    assert HttpConfig().second_tries is False
    async with run_gateway(tiny_model) as plain:
        plain.pipeline._checker._limits = CheckLimits(seconds=60.0)
        scripted(plain, call({"a": 1}))
        assert len((await plain.chat(tools=[TOOL]))["warnings"]) == 2
        assert len(plain.dispatcher.requests) == 1
