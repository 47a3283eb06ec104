"""Reasoning over HTTP: deltas, counts, stop strings, budgets in the grammar, and every way of asking for it."""

import json

import pytest
from fake_dispatcher import Script, write_model
from gateway_harness import run_gateway
from test_chat import CALL, WEATHER

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% elif thinks_at_once %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
THOUGHT = "<think>\nHm, STOP.\n</think>\n\n"


@pytest.fixture
async def thinking(tmp_path):
    async with run_gateway(write_model(tmp_path / "model", template=TEMPLATE)) as running:
        yield running


def sent(gateway):
    return gateway.dispatcher.requests[-1]


def budgets(grammar):
    """max_tokens of every part of a grammar."""
    if isinstance(grammar, list):
        return [found for part in grammar for found in budgets(part)]
    if not isinstance(grammar, dict):
        return []
    own = [grammar["max_tokens"]] if "max_tokens" in grammar else []
    return own + [found for part in grammar.values() for found in budgets(part)]


@pytest.mark.parametrize("cut", [1, 5, 1000])
async def test_reasoning_text_and_calls_are_told_apart(thinking, cut):
    thinking.dispatcher.script = Script(THOUGHT + "I look.\n" + CALL, cut=cut)
    whole = await thinking.chat(tools=[WEATHER], stop=["STOP"])
    (choice,) = whole["choices"]
    assert choice["message"]["reasoning_content"] == "Hm, STOP."
    assert choice["message"]["content"] == "I look."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    assert choice["finish_reason"] == "tool_calls"
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len("Hm, STOP.") <= counted <= len(THOUGHT)  # a token is a byte
    events = await thinking.chat_events(tools=[WEATHER], stop=["STOP"])
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, STOP."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."


async def test_a_prompt_that_opens_the_region(thinking):
    thinking.dispatcher.script = Script("Hm, STOP.</think>Yes, STOP no.")
    answer = await thinking.chat(chat_template_kwargs={"thinks_at_once": True}, stop=["STOP"])
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning_content"] == "Hm, STOP."
    assert choice["message"]["content"] == "Yes, "
    assert choice["stop_reason"] == "STOP"
    assert sent(thinking)["sampling"].stop_after == "</think>"


async def test_reasoning_that_max_tokens_cuts_is_reasoning(thinking):
    thinking.dispatcher.script = Script("<think>\nFirst", finish="length")
    (choice,) = (await thinking.chat())["choices"]
    assert choice["message"]["reasoning_content"] == "First"
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "budget"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 77}}, [77]),
        ({"thinking": {"budget": 0}}, [0]),
        ({"thinking_budget": 12}, [12]),
        ({"thinking_token_budget": 13}, [13]),
        ({"reasoning": {"max_tokens": 9}}, [9]),
        ({"reasoning_effort": "low"}, [1024]),
        ({"reasoning": {"effort": "minimal"}}, [256]),
        ({"reasoning_effort": "high"}, None),
        ({}, None),
        ({"reasoning_effort": "none"}, None),
        ({"thinking": {"type": "disabled"}}, None),
    ],
)
async def test_ways_to_bound_reasoning(thinking, body, budget):
    await thinking.chat(**body)
    grammar = sent(thinking)["prompt"].grammar
    assert (None if grammar is None else budgets(json.loads(grammar))) == budget


async def test_off_is_what_the_template_makes_of_it(thinking):
    thinking.dispatcher.script = Script("<think>no region</think>")
    answer = await thinking.chat(reasoning_effort="none")
    assert answer["choices"][0]["message"]["content"] == "<think>no region</think>"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"thinking": 5}, "thinking"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"thinking": {"budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"budget_tokens": True}}, "thinking.budget_tokens"),
        ({"reasoning": "low"}, "reasoning"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"thinking_budget": -3}, "thinking_budget"),
    ],
)
async def test_bad_fields_are_named(thinking, body, field):
    error = (await thinking.chat(status=400, **body))["error"]
    assert error["param"] == field
    assert field in error["message"]


async def test_a_template_without_reasoning_has_none(gateway):
    gateway.dispatcher.script = Script("<think>a</think>b")
    answer = await gateway.chat(thinking_budget=5)
    assert answer["choices"][0]["message"]["content"] == "<think>a</think>b"
    assert sent(gateway)["prompt"].grammar is None
