import asyncio

import orjson
import pytest
from fake_dispatcher import Script
from gateway_harness import run_gateway
from test_chat import CALL, WEATHER

from gateway.turn import TurnError


def content(events, index=0):
    parts = []
    for event in events:
        if isinstance(event, dict):
            parts += [c["delta"].get("content") or "" for c in event.get("choices", []) if c["index"] == index]
    return "".join(parts)


async def test_the_shape_of_a_stream(gateway):
    events = await gateway.chat_events(stream_options={"include_usage": True})
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert content(events) == "Hello there"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


async def test_usage_only_when_asked_for(gateway):
    events = await gateway.chat_events()
    assert all("usage" not in event for event in events[:-1])


async def test_streamed_and_whole_say_the_same(gateway):
    gateway.dispatcher.script = Script("let me see\n" + CALL, cut=3)
    whole = await gateway.chat(tools=[WEATHER])
    events = await gateway.chat_events(tools=[WEATHER])
    assert content(events) == (whole["choices"][0]["message"]["content"] or "")
    calls = [c for e in events[:-1] for ch in e["choices"] for c in ch["delta"].get("tool_calls", [])]
    assert [call.get("id") is not None for call in calls] == [True] + [False] * (len(calls) - 1)
    assert calls[0]["function"]["name"] == "weather"
    assert calls[0]["type"] == "function"
    assert all("name" not in call["function"] for call in calls[1:])
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments == whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_parallel_calls_have_their_own_index_and_do_not_interleave(gateway):
    second = CALL.replace("Paris", "Rome")
    gateway.dispatcher.script = Script(f"{CALL}\n{second}", cut=2)
    events = await gateway.chat_events(tools=[WEATHER])
    calls = [c for e in events[:-1] for ch in e["choices"] for c in ch["delta"].get("tool_calls", [])]
    indexes = [call["index"] for call in calls]
    assert indexes == sorted(indexes)
    assert set(indexes) == {0, 1}
    assert len({call["id"] for call in calls if "id" in call}) == 2
    for index, city in ((0, "Paris"), (1, "Rome")):
        text = "".join(call["function"]["arguments"] for call in calls if call["index"] == index)
        assert orjson.loads(text) == {"city": city}


async def test_a_call_without_parameters_streams_empty_arguments(gateway):
    gateway.dispatcher.script = Script('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    events = await gateway.chat_events(tools=[{"type": "function", "function": {"name": "now"}}])
    calls = [c for e in events[:-1] for ch in e["choices"] for c in ch["delta"].get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"


async def test_choices_keep_their_own_state(gateway):
    gateway.dispatcher.script = Script("é" + CALL, cut=3)
    events = await gateway.chat_events(tools=[WEATHER], n=3)
    opened = [event["choices"][0] for event in events[:3]]
    assert [(choice["index"], choice["delta"]["role"]) for choice in opened] == [(i, "assistant") for i in range(3)]
    for index in range(3):
        assert content(events, index) == "é"
        calls = [
            c for e in events[:-1] for ch in e["choices"] if ch["index"] == index for c in ch["delta"].get("tool_calls", [])
        ]
        assert orjson.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Paris"}


@pytest.mark.parametrize("text", ["🙂", "a🙂b", "日本語", "👨‍👩‍👧 family"])
async def test_characters_are_held_until_they_are_whole(gateway, text):
    gateway.dispatcher.script = Script(text, cut=1)
    events = await gateway.chat_events()
    pieces = [e["choices"][0]["delta"].get("content", "") for e in events[:-1]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


async def test_a_cut_character_is_flushed_at_the_end(gateway):
    gateway.dispatcher.script = Script("a🙂", cut=1)
    events = await gateway.chat_events(max_tokens=3)
    assert content(events).rstrip("\ufffd") == "a"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("cut", [1, 2, 5, 100])
async def test_a_stop_string_never_leaks(gateway, cut):
    gateway.dispatcher.script = Script("one STOP two", cut=cut)
    events = await gateway.chat_events(stop=["STOP"])
    assert content(events) == "one "
    assert events[-2]["choices"][0]["stop_reason"] == "STOP"
    gateway.dispatcher.script = Script("one STO two ST", cut=cut)
    assert content(await gateway.chat_events(stop=["STOP"])) == "one STO two ST"


async def test_a_stop_string_does_not_fire_inside_a_call(gateway):
    gateway.dispatcher.script = Script(CALL, cut=1, finish="stop")
    gateway.dispatcher.script.text = CALL
    events = await gateway.chat_events(tools=[WEATHER], stop=["Rome", "city"])
    calls = [c for e in events[:-1] for ch in e["choices"] for c in ch["delta"].get("tool_calls", [])]
    assert orjson.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Paris"}


async def test_logprobs_come_with_the_text_they_belong_to(gateway):
    gateway.dispatcher.script = Script("ab STOP", cut=1)
    events = await gateway.chat_events(stop=["STOP"], logprobs=True, top_logprobs=1)
    tokens = [
        entry["token"]
        for event in events[:-1]
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert "".join(tokens) == content(events) == "ab "


async def test_token_ids_stream(gateway):
    events = await gateway.chat_events(return_token_ids=True)
    ids = [i for event in events[:-1] for choice in event["choices"] for i in choice.get("token_ids", [])]
    assert len(ids) == 12
    assert len(events[0]["prompt_token_ids"]) == gateway.dispatcher.requests[0]["prompt"].num_tokens


async def test_pings_before_the_first_token_and_while_text_is_withheld(tiny_model):
    gate, pause = asyncio.Event(), asyncio.Event()
    async with run_gateway(tiny_model, ping_interval=0.05, headers_within=0.05) as gateway:
        gateway.dispatcher.script = Script("ab STO", gate=gate, pause=(4, pause))
        async with gateway.post(
            "/v1/chat/completions", {"messages": [{"role": "user"}], "stop": "STOP", "stream": True}
        ) as response:
            # The prompt still waits in its queue, so nothing is known of its cached tokens.
            assert "X-Turnkeep-Cached-Tokens" not in response.headers
            assert response.headers["X-Turnkeep-Replica"] == "replica-0"
            raw = b""

            async def pinged(since):
                nonlocal raw
                while since not in raw or raw[raw.index(since) :].count(b": ping\n\n") < 2:
                    more = await asyncio.wait_for(response.content.readany(), 20)
                    assert more
                    raw += more

            await pinged(b"")
            assert b'"content":"a"' not in raw
            gate.set()
            await pinged(b'"content":"a"')
            pause.set()
            raw += await response.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    assert b"\nid:" not in raw
    assert not raw.startswith(b"id:")


@pytest.mark.parametrize("fails", [False, True])
async def test_pings_before_a_worker_has_it(tiny_model, fails):
    async with run_gateway(tiny_model, ping_interval=0.05, headers_within=0.05) as gateway:
        placed = asyncio.Event()
        dispatch = gateway.dispatcher.dispatch

        async def slow(**kwargs):
            await placed.wait()
            return await dispatch(**kwargs)

        gateway.dispatcher.dispatch = slow
        if fails:
            gateway.dispatcher.script = Script(error=TurnError(503, "overloaded", "Too much to do.", retry_after=3))
        async with gateway.post("/v1/chat/completions", {"messages": [{"role": "user"}], "stream": True}) as response:
            assert response.status == 200
            assert response.headers["X-Request-ID"]
            assert "X-Turnkeep-Replica" not in response.headers
            for _ in range(3):
                assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
            placed.set()
            raw = (await response.read()).decode()
        events = [orjson.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        if fails:
            error = {"message": "Too much to do.", "type": "service_unavailable_error", "param": None, "code": "overloaded"}
            assert events == [{"error": error}]
        else:
            assert content(events) == "Hello there"
            assert raw.endswith("data: [DONE]\n\n")
        [record] = await gateway.observer.wait(1)
        assert record.status == (503 if fails else 200)


async def test_no_pings_while_there_is_something_to_say(gateway):
    assert all(isinstance(event, dict) for event in (await gateway.chat_events())[:-1])


async def test_an_error_before_the_first_byte_has_its_own_status(gateway):
    gateway.dispatcher.script = Script(error=TurnError(429, "rate_limited", "Slow down.", retry_after=3))
    answer = await gateway.chat(status=429, stream=True)
    assert answer["error"]["type"] == "rate_limit_error"


async def test_an_error_after_the_first_byte_ends_the_stream(gateway):
    gateway.dispatcher.script = Script(late_error=TurnError(502, "worker_lost", "The worker is gone."))
    events = await gateway.chat_events()
    assert events[-1] == {
        "error": {"message": "The worker is gone.", "type": "server_error", "param": None, "code": "worker_lost"}
    }
    assert "[DONE]" not in events
    assert content(events) == "Hello there"
    [record] = await gateway.observer.wait(1)
    assert (record.status, record.error, record.response) == (502, "The worker is gone.", None)


async def test_an_unforeseen_error_after_the_first_byte_ends_the_stream_too(gateway):
    gateway.dispatcher.script = Script(late_error=RuntimeError("secret"))
    events = await gateway.chat_events()
    assert events[-1]["error"]["code"] == "internal_error"
    assert (await gateway.observer.wait(1))[0].status == 500


async def test_a_streamed_turn_is_recorded_like_a_whole_one(gateway):
    await gateway.chat_events()
    await gateway.chat()
    streamed, whole = (record.response["choices"] for record in await gateway.observer.wait(2))
    assert streamed == whole
