"""The official OpenAI client against `turnkeep serve` over a real socket."""

import asyncio
import json
import time
import urllib.request

import jsonschema
import openai
import pytest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["unit", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(simulated):
    with openai.OpenAI(base_url=simulated.api, api_key="sk-test", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tiny_client(tiny):
    with openai.OpenAI(base_url=tiny.api, api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["smollm2", "gpt-4o"]
    assert client.models.retrieve("gpt-4o").root == "smollm2"


def test_a_chat_turn_whole_and_streamed(client):
    arguments = {"model": "smollm2", "messages": USER, "max_tokens": 8, "seed": 1, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**arguments)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_headers_and_usage_tell_where_a_turn_went(client):
    raw = client.chat.completions.with_raw_response.create(
        model="gpt-4o", messages=USER, max_tokens=2, extra_headers={"Session-ID": "s-1"}
    )
    usage = raw.parse().usage
    assert raw.headers["x-turnkeep-session"] == "s-1; source=session-id"
    assert raw.headers["x-turnkeep-replica"] == usage.turnkeep["replica"]
    assert int(raw.headers["x-turnkeep-cached-tokens"]) == usage.prompt_tokens_details.cached_tokens
    assert int(raw.headers["x-turnkeep-prompt-tokens"]) == usage.prompt_tokens


def test_a_session_stays_where_its_prefix_is(client):
    """Two agents with contexts of their own: every later turn finds what the one before left."""
    for agent in range(2):
        messages = [{"role": "system", "content": f"You are agent {agent}. " + f"rule {agent} " * 200}]
        replicas, cached, prompts = [], [], []
        for turn in range(4):
            messages.append({"role": "user", "content": f"step {turn}"})
            answer = client.chat.completions.create(
                model="smollm2", messages=messages, max_tokens=16, extra_headers={"X-Session-ID": f"agent-{agent}"}
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            replicas.append(answer.usage.turnkeep["replica"])
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
            prompts.append(answer.usage.prompt_tokens)
        assert len(set(replicas)) == 1
        # All of the previous prompt's whole blocks, at least.
        assert all(now >= before - 16 for now, before in zip(cached[1:], prompts[:-1], strict=True))


def test_completions(client):
    answer = client.completions.create(model="smollm2", prompt=["a", "b"], n=2, max_tokens=4, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]
    chunks = list(client.completions.create(model="smollm2", prompt="a", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_errors_are_the_clients_own_classes(client, simulated):
    with pytest.raises(openai.NotFoundError, match="Models are: 'smollm2', 'gpt-4o'") as caught:
        client.chat.completions.create(model="nope", messages=USER)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="smollm2", messages=USER, temperature=-1)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="context of 'smollm2' holds 8192") as caught:
        client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    with openai.OpenAI(base_url=simulated.api, api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


async def test_many_sessions_at_once(simulated):
    """Fifty agents, three turns each, side by side over two replicas."""
    async with openai.AsyncOpenAI(base_url=simulated.api, api_key="sk-test", max_retries=0, timeout=120) as client:

        async def agent(number):
            messages = [{"role": "system", "content": f"agent {number} " * 150}]
            replicas = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"turn {turn}"})
                text = []
                stream = await client.chat.completions.create(
                    model="smollm2",
                    messages=messages,
                    max_tokens=8,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_headers={"Session-ID": f"many-{number}"},
                )
                async for chunk in stream:
                    if chunk.choices:
                        text.append(chunk.choices[0].delta.content or "")
                    else:
                        replicas.append(chunk.usage.turnkeep["replica"])
                messages.append({"role": "assistant", "content": "".join(text)})
            return replicas

        visits = await asyncio.gather(*(agent(number) for number in range(50)))
    assert all(len(replicas) == 3 for replicas in visits)
    # Load may move a session whose prefix is this short; most stay.
    assert sum(len(set(replicas)) > 1 for replicas in visits) <= 15
    assert {replicas[0] for replicas in visits} == {"replica-0", "replica-1"}


def test_turns_are_recorded(client, simulated):
    client.chat.completions.create(model="smollm2", messages=USER, max_tokens=2, extra_headers={"Session-ID": "recorded"})
    for _ in range(100):
        files = [path for path in simulated.record.glob("*.jsonl") if "recorded" in path.name]
        if files and files[0].stat().st_size:
            break
        time.sleep(0.05)
    [line] = files[0].read_text().splitlines()
    assert json.loads(line)["session"].endswith("recorded")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_always_valid(tiny_client, choice, stream):
    arguments = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": choice, "max_tokens": 160, "seed": 3}
    if stream:
        chunks = list(tiny_client.chat.completions.create(**arguments, stream=True))
        finish = chunks[-1].choices[0].finish_reason
        calls = {}
        for chunk in chunks:
            for delta in chunk.choices[0].delta.tool_calls or []:
                if delta.id is not None:
                    assert delta.index not in calls
                    calls[delta.index] = [delta.function.name, ""]
                calls[delta.index][1] += delta.function.arguments
        calls = list(calls.values())
    else:
        answer = tiny_client.chat.completions.create(**arguments)
        finish = answer.choices[0].finish_reason
        calls = [[call.function.name, call.function.arguments] for call in answer.choices[0].message.tool_calls]
    named = choice != "required"
    assert calls
    if finish != "length":
        assert finish == ("stop" if named else "tool_calls")
    else:
        calls.pop()
    if named:
        assert [name for name, _ in calls] == ["weather"]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {"type": "object"}) for tool in TOOLS}
    for name, text in calls:
        jsonschema.validate(json.loads(text), schemas[name])


def test_tool_choice_none_and_one_call_at_a_time(tiny_client):
    answer = tiny_client.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice="none", max_tokens=60, temperature=2
    )
    assert answer.choices[0].message.tool_calls is None
    answer = tiny_client.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400, seed=1
    )
    assert len(answer.choices[0].message.tool_calls) == 1
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]},
    }
    answer = tiny_client.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice=allowed, parallel_tool_calls=False, max_tokens=400, seed=2
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "now"


def test_json_schema_answers(tiny_client):
    schema = TOOLS[0]["function"]["parameters"]
    answer = tiny_client.chat.completions.create(
        model="tiny",
        messages=USER,
        response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": schema, "strict": True}},
        max_tokens=400,
        temperature=1.5,
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


def test_a_refused_schema_names_tool_and_pointer(tiny_client):
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "object", "properties": {"a": {"enum": []}}}}}
    with pytest.raises(openai.BadRequestError, match="'bad'") as caught:
        tiny_client.chat.completions.create(model="tiny", messages=USER, tools=[TOOLS[0], bad])
    assert caught.value.param.startswith("/tools/1/function/parameters/properties/a")


def test_seed_and_logprobs(tiny_client):
    arguments = {"model": "tiny", "messages": USER, "max_tokens": 12, "seed": 7, "logprobs": True, "top_logprobs": 3}
    first, second = (tiny_client.chat.completions.create(**arguments).choices[0] for _ in range(2))
    assert first.message.content == second.message.content
    content = first.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace").rstrip("\ufffd") == (
        first.message.content.rstrip("\ufffd")
    )
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    greedy = tiny_client.chat.completions.create(**{**arguments, "temperature": 0, "seed": None}).choices[0]
    assert all(entry.logprob == max(top.logprob for top in entry.top_logprobs) for entry in greedy.logprobs.content)


async def test_leaving_a_stream_ends_the_generation(tiny):
    async with openai.AsyncOpenAI(base_url=tiny.api, api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=3900, stream=True, extra_body={"ignore_eos": True}
        )
        async for _chunk in stream:
            break
        await stream.close()
        answer = await client.chat.completions.create(model="tiny", messages=USER, max_tokens=2)
        assert answer.usage.completion_tokens <= 2
    for _ in range(100):
        metrics = urllib.request.urlopen(tiny.url + "/metrics").read().decode()  # noqa: ASYNC210 - nothing else runs
        if 'status="499"' in metrics:
            break
        await asyncio.sleep(0.05)
    assert 'status="499"' in metrics
