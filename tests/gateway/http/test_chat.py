import orjson
import pytest
from fake_dispatcher import Script
from gateway_harness import run_gateway

from gateway.turn import TurnError

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_a_chat_turn(gateway):
    answer = await gateway.chat()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", None)
    usage = answer["usage"]
    prompt = gateway.dispatcher.requests[0]["prompt"].num_tokens
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 12)
    assert usage["total_tokens"] == prompt + 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    known_as = usage["turnkeep"].pop("session")
    assert known_as.startswith("auto-")
    assert usage["turnkeep"] == {"replica": "replica-0", "session_source": "prefix"}
    assert gateway.dispatcher.prompt_text() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_headers_say_where_it_went_and_what_was_cached(gateway):
    body = {"messages": [{"role": "user", "content": "hi"}], "frobnicate": 1, "zap": 2}
    headers = {"Session-ID": "s 1", "X-Request-ID": "r-7"}
    for stream in (False, True):
        async with gateway.post("/v1/chat/completions", {**body, "stream": stream}, headers=headers) as response:
            await response.read()
            assert response.headers["X-Turnkeep-Replica"] == "replica-0"
            assert response.headers["X-Turnkeep-Session"] == "s%201; source=session-id"
            assert response.headers["X-Turnkeep-Cached-Tokens"] == "3"
            assert response.headers["X-Turnkeep-Prompt-Tokens"] == str(gateway.dispatcher.requests[0]["prompt"].num_tokens)
            assert response.headers["X-Request-ID"] == "r-7"
            assert response.headers["X-Turnkeep-Warning"] == "ignored unknown fields: frobnicate, zap"
    assert gateway.dispatcher.requests[0]["session"].key == "s 1"


async def test_ids_for_workers_are_ours_and_unique(gateway):
    for _ in range(2):
        async with gateway.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, headers={"X-Request-ID": "same"}
        ) as response:
            assert response.status == 200
    first, second = (request["request_id"] for request in gateway.dispatcher.requests)
    assert first != second
    assert first.startswith("chatcmpl-")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text", "text"),
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "input_text", "text": "a"}, "b"], "a\nb"),
    ],
)
async def test_content_in_every_form(gateway, content, expected):
    await gateway.chat(messages=[{"role": "user", "content": content}])
    assert gateway.dispatcher.prompt_text().startswith(f"<|im_start|>user\n{expected}<|im_end|>")


async def test_absent_content_is_empty_content(gateway):
    await gateway.chat(messages=[{"role": "user"}])
    assert gateway.dispatcher.prompt_text().startswith("<|im_start|>user\n<|im_end|>")


async def test_developer_is_system_where_the_template_does_not_know_it(gateway):
    await gateway.chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}])
    assert gateway.dispatcher.prompt_text().startswith("<|im_start|>system\nbe brief<|im_end|>")


async def test_unknown_content_parts_are_skipped_with_a_warning(gateway):
    content = [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "a"}, {"type": ["odd"]}]
    async with gateway.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}) as response:
        assert response.status == 200
        assert "skipped messages[0].content[0]" in response.headers["X-Turnkeep-Warning"]
    assert "user\na<" in gateway.dispatcher.prompt_text()


async def test_every_field_agents_send_is_taken_without_a_warning(gateway):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi", "name": "ann"}],
        "tools": [WEATHER],
        "tool_choice": "auto",
        "parallel_tool_calls": None,
        "response_format": {"type": "text"},
        "stream": False,
        "stream_options": None,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "seed": 5,
        "stop": ["##"],
        "max_tokens": 20,
        "max_completion_tokens": 30,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "logit_bias": {"5": -100, "6": 1.5},
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "x",
        "reasoning_effort": "low",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 3,
        "cache_salt": "salt",
        "priority": -3,
        "chat_template_kwargs": {"enable_thinking": False},
        "return_token_ids": True,
        "stop_token_ids": [9],
        "vllm_xargs": {"a": 1},
        "agent_hint": {"session_id": "h"},
    }
    async with gateway.post("/v1/chat/completions", body) as response:
        answer = orjson.loads(await response.read())
        assert response.status == 200, answer
        assert "X-Turnkeep-Warning" not in response.headers
    request = gateway.dispatcher.requests[0]
    sampling = request["sampling"]
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n, sampling.seed) == (30, 3, 2, 5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, -0.1, 1.1)
    assert sampling.logit_bias == {5: -100.0, 6: 1.5}
    assert (sampling.logprobs, sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (2, ("##",), (9,), True)
    assert sampling.stop_exempt == (("<tool_call>", "</tool_call>"),)
    assert (request["priority"], request["prompt"].cache_salt) == (-3, "salt")
    assert request["prompt"].grammar is not None
    assert answer["prompt_token_ids"]
    assert answer["choices"][0]["token_ids"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


async def test_nulls_mean_absent(gateway):
    names = ("stop", "n", "tools", "tool_choice", "max_tokens", "temperature", "logit_bias", "seed", "stream", "logprobs")
    await gateway.chat(**dict.fromkeys(names))
    sampling = gateway.dispatcher.requests[0]["sampling"]
    assert (sampling.n, sampling.temperature, sampling.max_tokens, sampling.logprobs) == (1, 1.0, None, None)


async def test_the_cache_salt_separates_block_hashes(gateway):
    messages = [{"role": "user", "content": "x" * 40}]
    await gateway.chat(messages=messages)
    await gateway.chat(messages=messages, cache_salt="a")
    plain, salted = (request["prompt"].digests for request in gateway.dispatcher.requests)
    assert len(plain) == len(salted) > 0
    assert set(plain).isdisjoint(salted)


async def test_two_tenants_with_one_cache_salt_share_nothing(tiny_model):
    messages = [{"role": "user", "content": "x" * 40}]
    async with run_gateway(tiny_model, api_keys=("one", "two")) as gateway:
        for path, prompt in (("/v1/chat/completions", {"messages": messages}), ("/v1/completions", {"prompt": "x" * 40})):
            gateway.dispatcher.requests.clear()
            for key in ("one", "two", "one"):
                body = {"model": "tiny", "cache_salt": "same", **prompt}
                await gateway.json(path, body, headers={"Authorization": f"Bearer {key}"})
            first, other, again = (request["prompt"] for request in gateway.dispatcher.requests)
            assert first.digests == again.digests != ()
            assert set(first.digests).isdisjoint(other.digests)
            assert first.cache_salt == again.cache_salt != other.cache_salt


async def test_a_tool_call(gateway):
    gateway.dispatcher.script = Script(CALL)
    answer = await gateway.chat(tools=[WEATHER])
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    assert orjson.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert '"weather"' in gateway.dispatcher.prompt_text()
    assert gateway.dispatcher.requests[0]["prompt"].grammar is not None


async def test_finish_reasons_of_tool_calls(gateway):
    gateway.dispatcher.script = Script(CALL)
    named = {"type": "function", "function": {"name": "weather"}}
    answer = await gateway.chat(tools=[WEATHER], tool_choice=named)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    answer = await gateway.chat(tools=[WEATHER], max_tokens=60)
    assert answer["choices"][0]["finish_reason"] == "length"
    gateway.dispatcher.script = Script("no call")
    answer = await gateway.chat(tools=[WEATHER])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in answer["choices"][0]["message"]


async def test_without_tools_a_call_is_text(gateway):
    gateway.dispatcher.script = Script(CALL)
    answer = await gateway.chat()
    assert answer["choices"][0]["message"]["content"] == CALL
    assert gateway.dispatcher.requests[0]["prompt"].grammar is None


async def test_a_call_without_parameters_has_empty_arguments(gateway):
    gateway.dispatcher.script = Script('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    answer = await gateway.chat(tools=[{"type": "function", "function": {"name": "now"}}])
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


async def test_a_history_with_calls_and_broken_arguments(gateway):
    broken = '{"city": "Os'
    history = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
                {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": broken}},
                {"id": "c3", "type": "custom", "custom": {"name": "x", "input": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
    ]
    await gateway.chat(messages=history, tools=[WEATHER])
    text = gateway.dispatcher.prompt_text()
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
    ) in text


@pytest.mark.parametrize("arguments", ["", None, "  ", "nonsense", "[1]", 5])
async def test_arguments_that_are_no_object_are_empty(gateway, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    await gateway.chat(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}])
    assert '"arguments": {}}' in gateway.dispatcher.prompt_text()


async def test_logprobs(gateway):
    gateway.dispatcher.script = Script("aé")
    answer = await gateway.chat(logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9]]
    assert content[0]["token"] == "a"
    assert content[0]["logprob"] == -0.5
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert (await gateway.chat(logprobs=True))["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert (await gateway.chat())["choices"][0]["logprobs"] is None


async def test_a_stop_string_is_cut_and_named(gateway):
    gateway.dispatcher.script = Script("one two three")
    answer = await gateway.chat(stop=" two", logprobs=True)
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "one"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " two")
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "one"


async def test_a_stop_token_has_no_text(gateway):
    z = gateway.dispatcher.tokenizer.token_to_id("z")
    gateway.dispatcher.script = Script("fiz", finish="stop")
    answer = await gateway.chat(stop_token_ids=[z], max_tokens=3)
    assert answer["choices"][0]["message"]["content"] == "fi"
    gateway.dispatcher.script = Script("zoo")
    answer = await gateway.chat(stop_token_ids=[z])
    assert answer["choices"][0]["message"]["content"] == "zoo"


async def test_max_tokens_beyond_the_context_ends_there(gateway):
    await gateway.chat(max_tokens=10**6, min_tokens=5)
    request = gateway.dispatcher.requests[0]
    assert request["sampling"].max_tokens == 2048 - request["prompt"].num_tokens


async def test_what_workers_refuse_reaches_the_caller(gateway):
    gateway.dispatcher.script = Script(error=TurnError(400, "kv_capacity_exceeded", "Needs 9 blocks of 4.", param="messages"))
    answer = await gateway.chat(status=400)
    assert answer["error"] == {
        "message": "Needs 9 blocks of 4.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "kv_capacity_exceeded",
    }


async def test_overload_says_when_to_come_back(gateway):
    gateway.dispatcher.script = Script(error=TurnError(503, "overloaded", "Busy.", retry_after=1.2))
    async with gateway.post("/v1/chat/completions", {"messages": [{"role": "user"}]}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "2"
        assert orjson.loads(await response.read())["error"]["type"] == "service_unavailable_error"


async def test_an_unforeseen_failure_is_a_500_without_details(gateway):
    gateway.dispatcher.script = Script(late_error=RuntimeError("secret"))
    answer = await gateway.chat(status=500)
    assert answer["error"]["code"] == "internal_error"
    assert "secret" not in answer["error"]["message"]
    gateway.dispatcher.script = Script()
    await gateway.chat()


@pytest.mark.parametrize("script", [Script(finish_index=1), Script(finish="abort")])
async def test_a_worker_that_answers_nonsense(gateway, script):
    gateway.dispatcher.script = script
    async with gateway.post("/v1/chat/completions", {"messages": [{"role": "user"}]}) as response:
        assert response.status in (502, 503)


async def test_observers_hear_of_every_turn(gateway):
    await gateway.chat(headers={"Session-ID": "s"})
    gateway.dispatcher.script = Script(error=TurnError(503, "overloaded", "Busy."))
    await gateway.chat(status=503)
    await gateway.chat(status=400, messages=[])  # never became a turn
    good, bad = await gateway.observer.wait(2)
    assert (good.status, good.error, good.finish_reason, good.worker) == (200, None, "stop", "replica-0")
    assert good.request["messages"] == [{"role": "user", "content": "hi"}]
    assert good.response["choices"][0]["message"]["content"] == "Hello there"
    assert (good.completion_tokens, good.cached_tokens, good.session.key) == (12, 3, "s")
    assert 0 < good.time_to_first_token <= good.duration
    assert (bad.status, bad.error, bad.response, bad.worker) == (503, "Busy.", None, None)


async def test_an_observer_that_fails_does_not_fail_the_turn(gateway, caplog):
    gateway.observer.turn_finished = lambda record: 1 / 0
    await gateway.chat()
    assert "an observer failed" in caplog.text


async def test_response_formats_become_grammars(gateway):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}},
        {"guided_json": schema},
        {"guided_json": orjson.dumps(schema).decode()},
        {"structured_outputs": {"json": schema}},
    ]
    for body in formats:
        await gateway.chat(**body)
        assert gateway.dispatcher.requests[-1]["prompt"].grammar is not None
    grammars = [request["prompt"].grammar for request in gateway.dispatcher.requests]
    assert len(set(grammars[1:])) == 1
