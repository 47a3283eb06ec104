import asyncio

import aiohttp
import openai
import pytest
from fake_dispatcher import Script
from gateway_harness import run_gateway

from gateway.patience import Patience
from gateway.turn import TurnError

USER = [{"role": "user", "content": "hi"}]


async def test_requests_over_a_keys_limit_are_429_before_anything_is_read(tiny_model):
    async with run_gateway(tiny_model, api_keys=("k requests_per_minute=2", "free")) as gateway:
        key = {"Authorization": "Bearer k"}
        for left in ("1", "0"):
            async with gateway.post("/v1/chat/completions", {"messages": USER}, headers=key) as response:
                assert response.status == 200
                assert response.headers["x-ratelimit-limit-requests"] == "2"
                assert response.headers["x-ratelimit-remaining-requests"] == left
        async with gateway.post("/v1/chat/completions", b"{", headers=key) as response:
            assert response.status == 429
            assert 1 <= int(response.headers["Retry-After"]) <= 30
            error = (await response.json())["error"]
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        await gateway.chat(headers={"Authorization": "Bearer free"})
        assert len(gateway.dispatcher.requests) == 3
        assert b'rate_limited_total{of="requests"} 1.0' in gateway.telemetry.render_metrics()


async def test_tokens_are_what_was_computed(tiny_model):
    async with run_gateway(tiny_model, api_keys=("k tokens_per_minute=10000",)) as gateway:
        key = {"Authorization": "Bearer k"}
        gateway.dispatcher.script = Script(text="abc", cached=20)
        async with gateway.post("/v1/chat/completions", {"messages": USER, "max_tokens": 8}, headers=key) as response:
            usage = (await response.json())["usage"]
            before = int(response.headers["x-ratelimit-remaining-tokens"])
        assert usage["prompt_tokens_details"]["cached_tokens"] == 20
        async with gateway.post(
            "/v1/chat/completions", {"messages": USER, "max_tokens": 8, "stream": True}, headers=key
        ) as response:
            after = int(response.headers["x-ratelimit-remaining-tokens"])
            await response.read()
        # The first turn was settled with what it used; the second one's estimate is a new prompt and 8 tokens.
        used = usage["prompt_tokens"] - 20 + usage["completion_tokens"]
        assert before == 10000 - usage["prompt_tokens"] - 8
        assert 10000 - used - usage["prompt_tokens"] - 8 <= after <= 10000 - used


async def test_a_priority_beyond_the_key_is_taken_down_with_a_warning(tiny_model):
    async with run_gateway(tiny_model, api_keys=("k", "boss priority=high")) as gateway:
        for key, priority in (("k", 0), ("boss", -1)):
            headers = {"Authorization": f"Bearer {key}", "X-Turnkeep-Priority": "high"}
            async with gateway.post("/v1/chat/completions", {"messages": USER}, headers=headers) as response:
                assert response.status == 200
                assert ("priority" in response.headers.get("X-Turnkeep-Warning", "")) == (key == "k")
            assert gateway.dispatcher.requests[-1]["priority"] == priority
        error = await gateway.json(
            "/v1/chat/completions",
            {"messages": USER},
            status=400,
            headers={"Authorization": "Bearer k", "X-Turnkeep-Priority": "now"},
        )
        assert error["error"]["param"] == "X-Turnkeep-Priority"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_may_not_take_for_ever(tiny_model, stream):
    async with run_gateway(tiny_model, request_timeout=0.3) as gateway:
        gateway.dispatcher.script = Script(text="abc", pause=(1, asyncio.Event()))
        if stream:
            events = await gateway.chat_events()
            assert events[-1]["error"]["code"] == "request_timeout"
        else:
            assert (await gateway.chat(status=504))["error"]["code"] == "request_timeout"
        # The client hears of it first.
        while not all(generation.closed for generation in gateway.dispatcher.generations):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert len(gateway.dispatcher.generations) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_that_says_nothing_is_ended(tiny_model, stream):
    async with run_gateway(tiny_model, stall_timeout=0.3) as gateway:
        gateway.dispatcher.script = Script(text="abc", pause=(1, asyncio.Event()))
        if stream:
            events = await gateway.chat_events()
            assert events[-1]["error"]["code"] == "generation_stalled"
        else:
            assert (await gateway.chat(status=504))["error"]["code"] == "generation_stalled"
        # The client hears of it first.
        while not all(generation.closed for generation in gateway.dispatcher.generations):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert len(gateway.dispatcher.generations) == 1


async def test_patience():
    now = [100.0]
    patience = Patience(10, 3, 98.0, clock=lambda: now[0])
    assert patience.left() == 3
    now[0] = 102
    patience.heard()
    patience.check()
    assert (patience.left(), patience.within(60), patience.over) == (3, 6, False)
    now[0] = 105
    with pytest.raises(TurnError, match="Nothing was heard"):
        patience.check()
    patience.heard()
    now[0] = 108
    assert patience.over
    with pytest.raises(TurnError, match="longer than 10 seconds"):
        patience.check()
    with pytest.raises(TurnError) as raised:
        patience.check_whole()
    assert raised.value.status == 504
    assert (patience.whole(), patience.left()) == (0, 0)
    patience = Patience(0, 3, 98.0, clock=lambda: now[0])
    patience.heard(99.5)  # of two times the later one counts
    assert patience.left() == 3
    patience.heard(109.0)
    assert patience.left() == 4
    endless = Patience(0, 0, 0.0)
    assert (endless.left(), endless.whole()) == (None, None)
    assert endless.within(5) == 5


async def test_idle_connections_cost_nobody_a_turn(tiny_model):
    async with run_gateway(tiny_model, max_connections=200) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(2000)]
        async with aiohttp.ClientSession() as http:
            async with http.post(gateway.url + "/v1/chat/completions", json={"messages": USER}) as response:
                assert response.status == 200
        assert len(gateway.server.connections) <= 200
        assert gateway.server.connections.evicted >= 1800
        assert gateway.server.connections.refused == 0
        for writer in writers:
            writer.close()


async def test_openais_client_understands_limits_and_waits_as_told(tiny_model):
    async with run_gateway(tiny_model, api_keys=("k requests_per_minute=30",)) as gateway:
        made = {"base_url": gateway.url + "/v1", "api_key": "k", "timeout": 30}
        async with openai.AsyncOpenAI(max_retries=0, **made) as client:

            async def many():
                while True:
                    await client.chat.completions.create(model="tiny", messages=USER)

            with pytest.raises(openai.RateLimitError) as raised:
                await many()
            assert raised.value.code == "rate_limit_exceeded"
            assert raised.value.response.headers["Retry-After"] in ("1", "2")
        async with openai.AsyncOpenAI(max_retries=3, **made) as client:
            # It comes back after the seconds that it was told.
            answer = await client.chat.completions.create(model="tiny", messages=USER)
            assert answer.choices[0].message.content == "Hello there"
