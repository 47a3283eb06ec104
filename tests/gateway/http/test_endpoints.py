import asyncio
import json

import aiohttp
import pytest
from gateway_harness import run_gateway

from gateway.access.config import AuthConfig
from gateway.auth import ApiKeys
from gateway.config import GatewayConfig, HttpConfig, ModelConfig
from gateway.server import HttpServer, ListenError
from gateway.turn import TurnError
from prefix_cache.hashing import pack_tokens
from sessions.identity import tenant_of

USER = [{"role": "user", "content": "hi"}]


async def test_models(tiny_model):
    async with run_gateway(tiny_model, aliases=("gpt-4o",)) as gateway:
        async with gateway.http.get(gateway.url + "/v1/models") as response:
            listed = await response.json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["tiny", "gpt-4o"]
        assert listed["data"][0]["max_model_len"] == 2048
        assert listed["data"][1]["root"] == "tiny"
        async with gateway.http.get(gateway.url + "/v1/models/tiny") as response:
            assert (await response.json())["id"] == "tiny"
        async with gateway.http.get(gateway.url + "/v1/models/other/name") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


async def test_tokenize_and_back(gateway):
    answer = await gateway.json("/tokenize", {"prompt": "héy<|im_end|>", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == 5
    assert answer["max_model_len"] == 2048
    assert answer["token_strs"][0] == "h"
    back = await gateway.json("/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "héy<|im_end|>"}


async def test_tokenize_messages(gateway):
    body = {"messages": USER}
    whole = await gateway.json("/tokenize", body)
    await gateway.chat()
    assert whole["count"] == gateway.dispatcher.requests[0]["prompt"].num_tokens
    without = await gateway.json("/tokenize", {**body, "add_generation_prompt": False})
    text = (await gateway.json("/detokenize", {"tokens": without["tokens"]}))["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert (await gateway.json("/tokenize", {**body, "tools": tools}))["count"] > whole["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_bad_tokenizing(gateway, path, body, param):
    assert (await gateway.json(path, body, status=400))["error"]["param"] == param


async def test_health_and_readiness(tiny_model):
    reasons = ["replica-1 is loading"]
    async with run_gateway(tiny_model, reasons=lambda: reasons) as gateway:
        async with gateway.http.get(gateway.url + "/health") as response:
            assert response.status == 200
        gateway.dispatcher.up = False
        async with gateway.http.get(gateway.url + "/ready") as response:
            assert response.status == 503
            answer = await response.json()
            assert answer["reasons"] == ["replica-1 is loading", "No worker of 'tiny' is up yet. Try again shortly."]
        reasons.clear()
        gateway.dispatcher.up = True
        async with gateway.http.get(gateway.url + "/ready") as response:
            assert (response.status, await response.json()) == (200, {"status": "ready"})


async def test_metrics_count_turns(gateway):
    await gateway.chat()
    await gateway.observer.wait(1)
    async with gateway.http.get(gateway.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    assert 'status="200"' in text


async def test_api_keys(tiny_model):
    async with run_gateway(tiny_model, api_keys=("key-1", "key-2")) as gateway:
        body = {"messages": USER}
        for headers, code in [
            ({}, "missing_api_key"),
            ({"Authorization": "Bearer "}, "missing_api_key"),
            ({"Authorization": "Basic key-1"}, "missing_api_key"),
            ({"Authorization": "Bearer key-3"}, "invalid_api_key"),
            ({"Authorization": "Bearer key-1x"}, "invalid_api_key"),
            ({"x-api-key": "key"}, "invalid_api_key"),
        ]:
            error = (await gateway.json("/v1/chat/completions", body, status=401, headers=headers))["error"]
            assert (error["code"], error["type"]) == (code, "authentication_error")
            assert "key-3" not in error["message"]
        # The key is looked at before the body is.
        await gateway.json("/v1/chat/completions", b"{", status=401)
        for path in ("/v1/models", "/v1/models/tiny"):
            async with gateway.http.get(gateway.url + path) as response:
                assert response.status == 401
        for path in ("/tokenize", "/detokenize"):
            await gateway.json(path, {"prompt": "a"}, status=401)
        for path in ("/health", "/ready"):
            async with gateway.http.get(gateway.url + path) as response:
                assert response.status == 200
        for headers in ({"Authorization": "Bearer key-1"}, {"authorization": "bearer key-2"}, {"x-api-key": "key-2"}):
            await gateway.json("/v1/chat/completions", body, headers={**headers, "Session-ID": "s"})
        tenants = [request["session"].tenant for request in gateway.dispatcher.requests]
        assert tenants == [tenant_of("key-1"), tenant_of("key-2"), tenant_of("key-2")]


def test_without_keys_everybody_comes_in_scoped_by_what_they_present():
    keys = ApiKeys(AuthConfig())
    assert not keys.required
    assert keys.tenant({}) == ""
    assert keys.tenant({"Authorization": "Bearer a"}) == tenant_of("a") != ""
    with pytest.raises(TurnError):
        ApiKeys(AuthConfig(keys=("x",))).tenant({"Authorization": "Bearer \udce9"})


async def test_a_port_in_use_is_a_sentence(tiny_model):
    from aiohttp import web

    async with HttpServer(web.Application(), HttpConfig(port=0)) as first:
        with pytest.raises(ListenError, match=f"Port {first.port} on 127.0.0.1 is in use"):
            async with HttpServer(web.Application(), HttpConfig(port=first.port)):
                pass
        with pytest.raises(ListenError, match="Choose another with --admin-port"):
            async with HttpServer(web.Application(), HttpConfig(port=first.port), options="--admin-"):
                pass
    with pytest.raises(ListenError, match="no address of this machine"):
        async with HttpServer(web.Application(), HttpConfig(host="192.0.2.1", port=0)):
            pass


def test_settings_out_of_range(tmp_path):
    model = ModelConfig("m", tmp_path)
    for settings in ({"port": 70000}, {"max_body_bytes": 0}, {"ping_interval": -1}, {"threads": 0}):
        with pytest.raises(ValueError, match=r"http\."):
            HttpConfig(**settings)
    with pytest.raises(ValueError, match="no source named 'x'"):
        GatewayConfig(models=(model,), session_sources=("x",))
    assert "secret" not in repr(GatewayConfig(models=(model,), auth=AuthConfig(keys=("secret",))))


@pytest.mark.parametrize(
    "sent",
    [b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\na\x01: b\r\n\r\n"],
)
async def test_what_is_not_http_is_one_line_in_the_log(caplog, sent):
    from aiohttp import web

    caplog.set_level("INFO")
    async with HttpServer(web.Application(), HttpConfig(port=0)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        assert (await reader.readline()).split()[1] == b"400"
        await reader.read()
        writer.close()
    (record,) = [record for record in caplog.records if record.name == "gateway.server"]
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert "127.0.0.1: it is not HTTP: " in record.getMessage()
    assert "\n" not in record.getMessage()


async def test_rendered_prompts_are_those_that_workers_get(gateway):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "temperature": 0.5}
    rendered = await gateway.json("/v1/chat/completions/render", body)
    await gateway.chat(max_tokens=7)
    sent = gateway.dispatcher.requests[-1]
    assert pack_tokens(rendered["token_ids"]) == sent["prompt"].packed_token_ids
    assert (rendered["sampling_params"]["max_tokens"], rendered["sampling_params"]["temperature"]) == (7, 0.5)
    assert len(gateway.dispatcher.requests) == 1
    plain = await gateway.json("/v1/completions/render", {"model": "tiny", "prompt": [[1, 2], [3]]})
    assert [entry["token_ids"] for entry in plain] == [[1, 2], [3]]
    refused = await gateway.json("/v1/chat/completions/render", {"model": "tiny"}, status=400)
    assert refused["error"]["param"] == "messages"


@pytest.mark.parametrize("framing", [b"Content-Length: 0\r\n", b"", b"Transfer-Encoding: chunked\r\n"])
async def test_a_request_without_a_body_is_told_so(tiny_model, framing):
    async with run_gateway(tiny_model) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        for path in (b"/v1/chat/completions", b"/v1/completions", b"/tokenize"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            end = b"0\r\n\r\n" if b"chunked" in framing else b""
            writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b\r\n%b" % (path, framing, end))
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b"The body is empty" in answer
            writer.close()


async def test_a_body_in_any_number_of_pieces(tiny_model):
    """One piece for each byte, which are more than are kept apart, and a long conversation that comes in several reads."""
    async with run_gateway(tiny_model) as gateway, aiohttp.ClientSession() as http:
        url = gateway.url + "/v1/chat/completions/render"
        headers = {"Content-Type": "application/json"}
        text = json.dumps({"messages": [{"role": "user", "content": "a" * 800}]}).encode()

        async def crumbs():
            for at in range(len(text)):
                yield text[at : at + 1]

        rendered = []
        for body in (crumbs(), text):
            async with http.post(url, data=body, headers=headers) as response:
                assert response.status == 200
                rendered.append((await response.json())["token_ids"])
        assert rendered[0] == rendered[1]
        long = json.dumps({"messages": [{"role": "user", "content": "b" * 3}] * 30_000}).encode()
        async with http.post(url, data=long, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
