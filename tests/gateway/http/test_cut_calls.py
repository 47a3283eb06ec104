"""A call that max_tokens cuts, in every format, streamed and not: its arguments are left as they are, the reason is length."""

import json

import pytest
from fake_dispatcher import Script
from gateway_harness import run_gateway

from grammar.formats.registry import FORMAT_NAMES, format_named

ARGUMENTS = {"city": "Paris on the Seine", "days": [1, 2, 3], "where": {"x": 1}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}, "where": {"type": "object"}},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
FULL = json.dumps(ARGUMENTS)
BEGUN = '{"city": "Paris on'


@pytest.mark.parametrize("name", FORMAT_NAMES)
async def test_a_cut_call(tiny_model, name):
    text = format_named(name).render_calls("", [("weather", ARGUMENTS)])
    async with run_gateway(tiny_model, tool_format=name) as gateway:
        for at, least in (
            ("on the", BEGUN[:-3]),
            ("Seine", '{"city": "Paris on the '),
            ("1, 2", '{"city": "Paris on the Seine"'),
        ):
            gateway.dispatcher.script = Script(text[: text.index(at)], finish="length")
            choice = (await gateway.chat(tools=[TOOL]))["choices"][0]
            assert choice["finish_reason"] == "length"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            written = call["function"]["arguments"]
            assert FULL.startswith(written)
            assert written.startswith(least)
            assert len(written) < len(FULL)
            events = await gateway.chat_events(tools=[TOOL])
            deltas = [event["choices"][0] for event in events[:-1] if event["choices"]]
            assert [delta["finish_reason"] for delta in deltas if delta["finish_reason"]] == ["length"]
            pieces = [piece for delta in deltas for piece in delta["delta"].get("tool_calls", ())]
            assert "".join(piece["function"].get("arguments") or "" for piece in pieces) == written
            assert [piece["function"]["name"] for piece in pieces if piece["function"].get("name")] == ["weather"]


@pytest.mark.parametrize("name", FORMAT_NAMES)
async def test_calls_of_one_answer_and_their_bounds(tiny_model, name):
    form = format_named(name)
    text = form.render_calls("", [("weather", {"city": "a"}), ("weather", {"city": "b"})])
    async with run_gateway(tiny_model, tool_format=name) as gateway:
        gateway.dispatcher.script = Script(text)
        for settings, most in (({}, 2), ({"parallel_tool_calls": False}, 1), ({"max_tool_calls": 1}, 1)):
            choice = (await gateway.chat(tools=[TOOL], **settings))["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            calls = choice["message"]["tool_calls"]
            cities = [json.loads(call["function"]["arguments"])["city"] for call in calls]
            assert cities == ["a", "b"][: most if form.in_parallel or name == "harmony" else 1]
            assert len({call["id"] for call in calls}) == len(calls)
