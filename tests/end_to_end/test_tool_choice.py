"""Tools with every tool_choice on the real model: whatever it emits as a call is valid against the schema."""

import json

import jsonschema
import openai
import pytest

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string", "maxLength": 30}, "limit": {"type": "integer", "minimum": 0, "maximum": 50}},
    "required": ["query", "limit"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "search": SEARCH, "now": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MESSAGES = [{"role": "user", "content": "How will the weather be in Oslo this week? Search for it too."}]


def ask(client, **settings):
    settings = {"max_tokens": 120, "messages": MESSAGES, "tools": TOOLS} | settings
    return client.chat.completions.create(model="smollm2", **settings).choices[0]


def check(call):
    """The call's arguments are JSON and valid against its tool's schema."""
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", range(4))
def test_required_is_a_valid_call_at_high_temperature(client, seed):
    choice = ask(client, tool_choice="required", parallel_tool_calls=False, temperature=1.3, seed=seed)
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    check(call)


@pytest.mark.parametrize("name", SCHEMAS)
def test_named_is_one_call_of_that_tool_and_its_finish_reason_is_stop(client, name):
    choice = ask(client, tool_choice={"type": "function", "function": {"name": name}}, temperature=1.0, seed=1)
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls
    assert call.function.name == name
    check(call)


def test_none_is_text(client):
    choice = ask(client, tool_choice="none", temperature=0, max_tokens=20)
    assert not choice.message.tool_calls
    assert choice.message.content


def test_auto_is_text_or_valid_calls(client):
    choice = ask(client, tool_choice="auto", temperature=0.7, seed=3, n=1)
    for call in (choice.message.tool_calls or [])[:-1] if choice.finish_reason == "length" else choice.message.tool_calls or []:
        check(call)
    assert choice.message.content or choice.message.tool_calls


def test_allowed_tools_are_the_only_ones(client):
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "search"}}]},
    }
    choice = ask(client, tool_choice=allowed, temperature=1.2, seed=9, parallel_tool_calls=False)
    (call,) = choice.message.tool_calls
    assert call.function.name == "search"
    check(call)


def test_streamed_calls_come_piece_by_piece_and_add_up_to_what_the_whole_answer_says(client):
    settings = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0.9, "seed": 5}
    whole = ask(client, **settings)
    stream = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, tools=TOOLS, max_tokens=120, stream=True, **settings
    )
    pieces, names, ids, finish = [], [], [], []
    for chunk in stream:
        for choice in chunk.choices:
            finish.append(choice.finish_reason)
            for delta in choice.delta.tool_calls or []:
                assert delta.index == 0
                names.append(delta.function.name)
                ids.append(delta.id)
                pieces.append(delta.function.arguments or "")
    assert "".join(pieces) == whole.message.tool_calls[0].function.arguments
    assert [n for n in names if n] == [whole.message.tool_calls[0].function.name]
    assert len([i for i in ids if i]) == 1
    assert len(pieces) > 3
    assert finish[-1] == "tool_calls"


def test_json_schema_and_json_object_hold(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    ask_for = [{"role": "user", "content": "Invent a person. Answer in JSON."}]
    formats = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for seed in range(3):
        choice = ask(client, messages=ask_for, tools=openai.omit, response_format=formats, temperature=1.2, seed=seed)
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    choice = ask(client, messages=ask_for, tools=openai.omit, response_format={"type": "json_object"}, temperature=0)
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.lstrip().startswith("{")


def test_a_refused_schema_names_tool_and_pointer(client):
    bad = [{"type": "function", "function": {"name": "broken", "parameters": {"properties": {"x": {"enum": []}}}}}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tools=bad, tool_choice="required")
    assert "broken" in str(refused.value)
    assert "/properties/x" in str(refused.value)
