"""Whatever is sent, the answer is a completion or a 4xx in the right shape; never a 500."""

import asyncio

import orjson
import pytest
from fake_dispatcher import Script, write_model
from gateway_harness import run_gateway
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.apis.openai.chat_request import ChatRequest
from gateway.apis.openai.completion_request import CompletionRequest

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([0, 1, 2, 5, -1, 0.5, 1e300, "", "a", "function", "auto", "text", "user", "tool", "json_schema"])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
WORDS = (
    "type function name parameters text content role tool_calls arguments schema json_schema mode tools allowed_tools "
    "session_id user_id include_usage properties id enum json $ref"
)
keys = st.sampled_from(WORDS.split()) | st.text(max_size=4)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=10
)

small = st.integers(-2, 6)
likely = {
    "model": st.sampled_from(["tiny", None, "other"]),
    "n": small,
    "max_tokens": small,
    "min_tokens": small,
    "stream": st.booleans(),
    "temperature": st.floats(-1, 3),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "logprobs": st.booleans() | small,
    "top_logprobs": small,
    "echo": st.booleans(),
    "prompt": st.text(max_size=5) | st.lists(st.text(max_size=3) | small | st.lists(small, max_size=3), max_size=3),
}
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": st.text(max_size=6) | anything,
        "tool_calls": st.none()
        | st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.text(max_size=4), "arguments": anything})}),
            max_size=2,
        ),
        "reasoning_content": anything,
        "tool_call_id": st.text(max_size=3),
    },
)
tool = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g", "a b"])})}
) | st.fixed_dictionaries({"function": st.dictionaries(keys, anything, max_size=4)})


def bodies(kind, required):
    fields = {name: likely.get(name, anything) | anything for name in kind.__struct_encode_fields__ if name not in required}
    return st.fixed_dictionaries(required, optional=fields)


chats = bodies(ChatRequest, {"messages": st.lists(message, max_size=4) | anything}).flatmap(
    lambda body: st.just(body) | st.lists(tool, max_size=3).map(lambda tools: {**body, "tools": tools})
)
completions = bodies(CompletionRequest, {"prompt": likely["prompt"] | anything})
ERROR_FIELDS = {"message", "type", "param", "code"}


@pytest.mark.slow
def test_any_body_is_answered(tmp_path):
    directory = write_model(tmp_path / "model")
    loop = asyncio.new_event_loop()
    context = run_gateway(directory)
    gateway = loop.run_until_complete(context.__aenter__())
    gateway.dispatcher.script = Script('ok <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', cut=4)

    async def check(path, raw):
        async with gateway.post(path, raw, headers={"Content-Type": "application/json"}) as response:
            text = await response.read()
        assert response.status == 200 or 400 <= response.status < 500, (response.status, text)
        if response.status != 200:
            error = orjson.loads(text)["error"]
            assert set(error) == ERROR_FIELDS
            assert error["message"].endswith(".")
        elif response.content_type == "text/event-stream":
            assert text.endswith(b"data: [DONE]\n\n")
        else:
            assert orjson.loads(text)["choices"]

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.tuples(st.just("/v1/chat/completions"), chats) | st.tuples(st.just("/v1/completions"), completions))
    def of_json(case):
        path, body = case
        loop.run_until_complete(check(path, orjson.dumps(body)))

    @settings(max_examples=100, deadline=None)
    @given(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]), st.binary(max_size=40))
    def of_bytes(path, raw):
        loop.run_until_complete(check(path, raw))

    try:
        of_json()
        of_bytes()
        assert gateway.dispatcher.generations, "nothing ever got through"
    finally:
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.close()
