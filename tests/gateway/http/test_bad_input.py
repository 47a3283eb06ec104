import asyncio
import gzip
import time

import orjson
import pytest
from gateway_harness import run_gateway

from gateway.apis.bodies import parse_object
from gateway.turn import TurnError

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


async def refused(gateway, raw, *, status=400, path="/v1/chat/completions", headers=None):
    answer = await gateway.json(path, raw, status=status, headers=headers)
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", ")."))
    assert gateway.dispatcher.requests == []
    return error


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "body is empty"),
        (b"   ", "body is empty"),
        (b'{"messages": [', "line 1, column 15"),
        (b'{"messages":\n [}', "line 2, column 3"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": Infinity}', "not valid JSON"),
        (b'{"temperature": 1e999}', "infinity"),
        (b'{"a": "\xff"}', "not UTF-8: byte 7 (0xff)"),
        ("\ufeff{}".encode("utf-16"), "not UTF-8"),
        (b"[1, 2]", "JSON object, not an array"),
        (b"null", "JSON object, not null"),
        (b"true", "JSON object, not a boolean"),
        (b"5", "JSON object, not a number"),
        (b'"text"', "JSON object, not a string"),
        (b"[" * 100_000, "depth limit"),
        (b'{"a":' * 100_000, "depth limit"),
        (b"\x00\x01", "not valid JSON"),
    ],
)
async def test_bodies_that_are_no_json_object(gateway, raw, words):
    error = await refused(gateway, raw)
    assert words in error["message"]
    assert error["code"] == "malformed_body"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "messages", "expected array, got null"),
        ({"messages": "hi"}, "messages", "expected array, got string"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [5]}, "messages[0]", "expected object, got integer"),
        ({"messages": [{}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "wizard"}]}, "messages[0].role", "system, developer, user, assistant, tool"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string or array or null"),
        ({"messages": [*USER, {"role": "user", "content": [7]}]}, "messages[1].content[0]", "object with a type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "is an image, and the model reads text only",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "string"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls", "array"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "missing"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
            "messages[0].tool_calls[0].function.name",
            "expected string",
        ),
        ({"model": 5}, "model", "string"),
        ({"stream": "yes"}, "stream", "expected boolean or null, got string"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"temperature": 1e6}, "temperature", "<= 2"),
        ({"temperature": "hot"}, "temperature", "number or null"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_p": 1.01}, "top_p", "<= 1"),
        ({"min_p": -0.1}, "min_p", ">= 0"),
        ({"top_k": -5}, "top_k", ">= -1"),
        ({"top_k": 2.5}, "top_k", "integer or null"),
        ({"presence_penalty": 3}, "presence_penalty", "<= 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", ">= -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_completion_tokens": -4}, "max_completion_tokens", ">= 1"),
        ({"max_tokens": True}, "max_tokens", "integer or null"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "6 is more than max_tokens (5)"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens", "max_completion_tokens (5)"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 100_000}, "n", "at most 128"),
        ({"seed": 2**63}, "seed", ""),
        ({"seed": 1.5}, "seed", "integer or null"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"stop": ["a", ""]}, "stop[1]", "must not be empty"),
        ({"stop": [5]}, "stop[0]", "expected string"),
        ({"stop": ["x"] * 100}, "stop", "at most 64"),
        ({"stop": "x" * 2000}, "stop", "1024 characters"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids[0]", "vocabulary"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "<= 100"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias", "at most 4096"),
        ({"top_logprobs": 5}, "top_logprobs", "logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"priority": 2**40}, "priority", ""),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "leave it out"),
        ({"tools": {}}, "tools", "array"),
        ({"tools": [5]}, "/tools/0", "must be an object"),
        ({"tools": [{"type": "function"}]}, "/tools/0/function", "object"),
        ({"tools": [{"type": "function", "function": {}}]}, "/tools/0/function/name", "non-empty string"),
        ({"tools": [TOOL, TOOL]}, "/tools/1/function/name", "two tools named 'f'"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(513)]}, "tools", "at most 512"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "/tools/0/function/parameters", ""),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "/tools/0/function/strict", ""),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "/tools/0/function/description", ""),
        ({"tool_choice": "required"}, "tool_choice", "no function tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no function tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", '"none", "auto", "required"'),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "no tool named 'g'; tools are: f",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name", "name of a tool"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
            "at least one",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice.allowed_tools.mode", ""),
        ({"response_format": "json"}, "response_format", "object with a type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "name and schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 5}}},
            "response_format.json_schema.schema",
            "JSON Schema",
        ),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "keep one"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
    ],
)
async def test_fields_that_make_no_sense(gateway, fields, param, words):
    error = await refused(gateway, {"messages": USER, **fields})
    assert error["param"] == param
    assert words in error["message"]
    assert param.replace("[...]", "") in error["message"]


async def test_a_number_beyond_64_bits(gateway):
    error = await refused(gateway, b'{"messages": [{"role": "user"}], "max_tokens": 1' + b"0" * 40 + b"}")
    assert error["message"] == "max_tokens: expected integer or null, got number."


async def test_a_schema_that_no_grammar_can_hold_names_tool_and_pointer(gateway):
    schema = {"type": "object", "properties": {"a": {"enum": []}}}
    error = await refused(
        gateway, {"messages": USER, "tools": [TOOL, {"type": "function", "function": {"name": "bad", "parameters": schema}}]}
    )
    assert error["param"].startswith("/tools/1/function/parameters/properties/a")
    assert "'bad'" in error["message"]
    error = await refused(
        gateway,
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
    )
    assert error["param"].startswith("/response_format/json_schema/schema/properties/a")


async def test_an_unknown_model_names_those_there_are(tiny_model):
    async with run_gateway(tiny_model, aliases=("small",)) as gateway:
        error = await refused(gateway, {"model": "gpt-9", "messages": USER}, status=404)
        assert error["message"] == "There is no model 'gpt-9' here. Models are: 'tiny', 'small'."
        assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
        assert (await gateway.chat(model="small"))["model"] == "tiny"


async def test_a_prompt_longer_than_the_context_says_both_numbers(tiny_model):
    async with run_gateway(tiny_model, max_model_len=128) as gateway:
        error = await refused(gateway, {"messages": [{"role": "user", "content": "x" * 150}]})
        count = 150 + len("user\n") + len("\n") + len("assistant\n") + 3
        assert f"{count} tokens" in error["message"]
        assert "128" in error["message"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        error = await refused(gateway, {"prompt": [[5] * 128]}, path="/v1/completions")
        assert "128 tokens" in error["message"]
        assert error["param"] == "prompt"
        error = await refused(gateway, {"messages": [{"role": "user", "content": "x" * 10**6}]})
        assert "at least" in error["message"]


async def test_a_body_over_the_limit(tiny_model):
    async with run_gateway(tiny_model, max_body_bytes=10_000) as gateway:
        large = orjson.dumps({"messages": [{"role": "user", "content": "x" * 20_000}]})
        error = await refused(gateway, large, status=413)
        assert error["code"] == "body_too_large"
        assert "10000 bytes" in error["message"]

        async def chunks():
            for start in range(0, len(large), 1000):
                yield large[start : start + 1000]

        async with gateway.http.post(gateway.url + "/v1/chat/completions", data=chunks()) as response:
            assert response.status == 413
        # A small body that unpacks to a large one is a large one.
        async with gateway.post("/v1/chat/completions", gzip.compress(large), headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 413
        await gateway.chat()


@pytest.mark.parametrize(
    "many",
    [b"[],", b'{"a":1},', b'"[","[",'],
    ids=["lists", "objects", "strings with brackets"],
)
async def test_a_body_of_too_many_values_is_refused_before_it_holds_up_the_others(gateway, many):
    raw = b'{"messages": [], "metadata": [' + many * 800_000 + b"1]}"
    began = time.monotonic()
    error = await refused(gateway, raw)
    assert "more values than are taken: at most 500000 arrays and objects" in error["message"]
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "text", ["if (x) { y[0] = {}; }" * 200_000, '\\"[' * 600_000, "[" * 600_000], ids=["code", "quotes", "open"]
)
def test_brackets_inside_a_text_are_no_values(text):
    body, warnings = parse_object(orjson.dumps({"a": text, "b": [1]}))
    assert (body["a"], body["b"], warnings) == (text, [1], [])


@pytest.mark.parametrize("raw", [b'{"a": "' + b"[" * 600_000, b'"' + b"\\" * 600_001 + b"[" * 600_000])
def test_a_text_of_brackets_without_end_is_bad_json(raw):
    with pytest.raises(TurnError, match="not valid JSON"):
        parse_object(raw)


async def test_a_packed_body_is_unpacked(gateway):
    body = gzip.compress(orjson.dumps({"messages": USER}))
    await gateway.json("/v1/chat/completions", body, headers={"Content-Encoding": "gzip"})


async def test_a_body_that_is_not_packed_as_it_says(gateway):
    async with gateway.post("/v1/chat/completions", b"{}", headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 400


@pytest.mark.parametrize("size", [300_000, 2**20, 2**20 + 1, 3_000_000])
@pytest.mark.parametrize("way", ["at once", "by and by", "in chunks", "packed"])
async def test_large_bodies_arrive_however_they_are_sent(gateway, size, way):
    """Those that are waited for as a whole and those that are not; packed ones are longer than they say."""
    raw = orjson.dumps({"messages": USER, "metadata": {"padding": ""}, "max_tokens": 1})
    raw = raw.replace(b'"padding":""', b'"padding":"' + b"x" * (size - len(raw)) + b'"')
    assert len(raw) == size
    packed = way == "packed"
    sent = gzip.compress(raw) if packed else raw
    framing = b"Transfer-Encoding: chunked" if way == "in chunks" else b"Content-Length: %d" % len(sent)
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n" + b"Content-Encoding: gzip\r\n" * packed
    writer.write(head + b"\r\n")
    step = len(sent) if way == "at once" else 77_777
    for start in range(0, len(sent), step):
        part = sent[start : start + step]
        writer.write(b"%x\r\n%s\r\n" % (len(part), part) if way == "in chunks" else part)
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n" * (way == "in chunks"))
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    assert answer.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_half_sent_body_is_not_waited_for_for_ever(tiny_model):
    async with run_gateway(tiny_model, body_timeout=0.2) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b'{"messages"')
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert answer.startswith(b"HTTP/1.1 408")
        writer.close()
        # And one that leaves in the middle.
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b'{"messages"')
        await writer.drain()
        writer.close()
        await gateway.chat()


def nested(depth):
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize("depth", [30, 300, 900])
async def test_deep_nesting_is_served_or_refused(gateway, depth):
    """Every place that takes any JSON, down to what the parser allows."""
    deep = nested(depth)
    tool = b'{"type": "function", "function": {"name": "f", "parameters": %s}}' % deep
    history = b'[{"role": "user"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}]'
    for path, raw in [
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "tools": [%s]}' % tool),
        ("/tokenize", b'{"messages": [{"role": "user"}], "tools": [%s]}' % tool),
        ("/v1/chat/completions", b'{"messages": %s}' % (history % deep)),
        ("/v1/chat/completions", b'{"messages": %s}' % (history % orjson.dumps(deep.decode()))),
        ("/tokenize", b'{"messages": %s}' % (history % deep)),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "chat_template_kwargs": %s}' % deep),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "guided_json": %s}' % deep),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [%s]}]}' % deep),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "metadata": %s}' % deep),
        ("/v1/completions", b'{"prompt": [%s]}' % deep),
    ]:
        async with gateway.post(path, raw) as response:
            assert response.status in (200, 400), (path, raw[:80], await response.read())


async def test_half_surrogate_pairs_are_replaced(gateway):
    raw = rb'{"messages": [{"role": "user", "content": "a\ud83d b\\ud83d \ud83d\ude00"}]}'
    async with gateway.post("/v1/chat/completions", raw) as response:
        assert response.status == 200
        assert "U+FFFD" in response.headers["X-Turnkeep-Warning"]
    assert "user\na\ufffd b\\ud83d 😀<" in gateway.dispatcher.prompt_text()


async def test_paths_and_methods(gateway):
    async with gateway.http.get(gateway.url + "/v1/nowhere") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"
    async with gateway.http.get(gateway.url + "/v1/chat/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_warnings_fit_into_a_header(gateway):
    fields = {f"ünknown\r\nX-Evil: {i}": 1 for i in range(500)}
    async with gateway.post("/v1/chat/completions", {"messages": USER, **fields}) as response:
        assert response.status == 200
        warning = response.headers["X-Turnkeep-Warning"]
        assert len(warning) <= 2000
        assert warning.isascii()
        assert "X-Evil" not in response.headers


@pytest.mark.parametrize("given", ["a\tb", "x" * 200, "ünïcode", ""])
async def test_request_ids_unfit_for_a_log_are_replaced(gateway, given):
    async with gateway.post(
        "/v1/chat/completions", {"messages": USER}, headers={"X-Request-ID": given.encode().decode("latin-1")}
    ) as response:
        assert response.headers["X-Request-ID"].startswith("req-")


async def test_no_worker_up(gateway):
    gateway.dispatcher.up = False
    async with gateway.post("/v1/chat/completions", {"messages": USER}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
    gateway.dispatcher.up = True


async def test_the_message_of_a_template_reaches_the_caller(tmp_path):
    from fake_dispatcher import write_model

    template = "{{ raise_exception('roles must alternate') }}"
    async with run_gateway(write_model(tmp_path / "m", template=template)) as gateway:
        error = await refused(gateway, {"messages": USER})
        assert (error["code"], error["param"]) == ("chat_template_error", "messages")
        assert "roles must alternate." in error["message"]
    async with run_gateway(write_model(tmp_path / "n", template=None)) as gateway:
        error = await refused(gateway, {"messages": USER})
        assert error["code"] == "no_chat_template"
        await gateway.json("/v1/completions", {"prompt": "a"})


def test_turn_errors_round_trip():
    error = TurnError(400, "c", "m", param="p", retry_after=1)
    assert (error.status, error.code, error.message, error.param, error.retry_after) == (400, "c", "m", "p", 1)
