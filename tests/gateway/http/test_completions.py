import pytest
from fake_dispatcher import Script, write_model
from gateway_harness import run_gateway

from prefix_cache.hashing import unpack_tokens


async def complete(gateway, status=200, **body):
    return await gateway.json("/v1/completions", body, status=status)


async def test_a_completion(gateway):
    answer = await complete(gateway, prompt="Say", max_tokens=50)
    assert answer["object"] == "text_completion"
    [choice] = answer["choices"]
    assert (choice["text"], choice["index"], choice["finish_reason"], choice["logprobs"]) == ("Hello there", 0, "stop", None)
    assert gateway.dispatcher.prompt_text() == "Say"
    assert answer["usage"]["prompt_tokens"] == 3


async def test_sixteen_tokens_by_default(gateway):
    gateway.dispatcher.script = Script("x" * 40)
    answer = await complete(gateway, prompt="a")
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"
    await complete(gateway, prompt="a", min_tokens=20)
    assert gateway.dispatcher.requests[-1]["sampling"].max_tokens == 20


async def test_prompts_in_every_form(gateway):
    ids = gateway.dispatcher.tokenizer.encode("abc", add_special_tokens=False).ids
    for prompt, expected in [
        ("abc", ["abc"]),
        (["abc"], ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        (ids, ["abc"]),
        ([ids, ids[:1]], ["abc", "a"]),
    ]:
        gateway.dispatcher.requests.clear()
        answer = await complete(gateway, prompt=prompt)
        assert [gateway.dispatcher.prompt_text(i) for i in range(len(expected))] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert len({request["request_id"] for request in gateway.dispatcher.requests}) == len(expected)


async def test_choices_are_numbered_prompt_by_prompt(gateway):
    answer = await complete(gateway, prompt=["a", "b"], n=2, echo=True, max_tokens=50)
    assert [choice["text"] for choice in answer["choices"]] == ["aHello there"] * 2 + ["bHello there"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 48
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


async def test_streaming_several_prompts(gateway):
    gateway.dispatcher.script = Script("Hällo")
    body = {"prompt": ["a", "b", "c"], "n": 2, "echo": True, "stream_options": {"include_usage": True}}
    events = await gateway.events("/v1/completions", body)
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 3
    texts, finished = {}, {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                assert choice["index"] not in finished
                finished[choice["index"]] = choice["finish_reason"]
    assert texts == {i: "aabbcc"[i] + "Hällo" for i in range(6)}
    assert finished == dict.fromkeys(range(6), "stop")


async def test_echo_of_token_ids(gateway):
    ids = gateway.dispatcher.tokenizer.encode("xy", add_special_tokens=False).ids
    assert (await complete(gateway, prompt=ids, echo=True))["choices"][0]["text"] == "xyHello there"


async def test_logprobs(gateway):
    gateway.dispatcher.script = Script("aé")
    answer = await complete(gateway, prompt="p", logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][0]["a"] == -0.5
    assert len(logprobs["top_logprobs"][0]) == 2
    events = await gateway.events("/v1/completions", {"prompt": "p", "logprobs": 0})
    streamed = [choice["logprobs"] for event in events[:-1] for choice in event["choices"] if choice["logprobs"]]
    assert [token for part in streamed for token in part["tokens"]] == logprobs["tokens"]
    assert [offset for part in streamed for offset in part["text_offset"]] == [0, 1, 2]


async def test_token_ids_in_the_answer(gateway):
    answer = await complete(gateway, prompt="ab", return_token_ids=True)
    choice = answer["choices"][0]
    prompt = gateway.dispatcher.requests[0]["prompt"]
    assert choice["prompt_token_ids"] == unpack_tokens(prompt.packed_token_ids).tolist()
    assert len(choice["token_ids"]) == 12


async def test_stop_strings_and_grammars(gateway):
    assert (await complete(gateway, prompt="a", stop=[" t"]))["choices"][0]["text"] == "Hello"
    await complete(gateway, prompt="a", response_format={"type": "json_object"})
    assert gateway.dispatcher.requests[-1]["prompt"].grammar is not None


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": None}, "prompt", "string or array"),
        ({"prompt": []}, "prompt", "at least one prompt"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": ["a", ""]}, "prompt[1]", "no tokens"),
        ({"prompt": ["a", 5]}, "prompt[1]", "must all be strings"),
        ({"prompt": [5, "a"]}, "prompt[1]", "token id"),
        ({"prompt": [[5], [-1]]}, "prompt[1][0]", "token id"),
        ({"prompt": [5, True]}, "prompt[1]", "token id"),
        ({"prompt": [[1], []]}, "prompt[1]", "no tokens"),
        ({"prompt": [10**9]}, "prompt", "not in the vocabulary"),
        ({"prompt": ["a"] * 200}, "prompt", "at most 128"),
        ({"prompt": ["a"] * 100, "n": 2}, "n", "more than 128 choices"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "middle"),
        ({"prompt": "a", "best_of": 3}, "best_of", "ranked"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo", "log-probabilities"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "integer"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", ">= 1"),
    ],
)
async def test_bad_bodies(gateway, body, param, words):
    error = (await complete(gateway, status=400, **body))["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert gateway.dispatcher.requests == []


async def test_one_prompt_that_fails_ends_the_others(gateway):
    seen = []
    dispatch = gateway.dispatcher.dispatch

    async def third_fails(**request):
        seen.append(request)
        if len(seen) == 3:
            raise gateway_error
        return await dispatch(**request)

    from gateway.turn import TurnError

    gateway_error = TurnError(503, "overloaded", "Busy.", retry_after=1)
    gateway.dispatcher.dispatch = third_fails
    assert (await complete(gateway, status=503, prompt=["a", "b", "c"]))["error"]["code"] == "overloaded"
    assert all(generation.closed for generation in gateway.dispatcher.generations)


async def test_a_prompt_gets_the_special_tokens_of_its_tokenizer(tmp_path):
    async with run_gateway(write_model(tmp_path, adds_bos=True)) as gateway:
        await complete(gateway, prompt="ab")
        assert gateway.dispatcher.prompt_text() == "<|im_start|>ab"
        # A chat template writes its own: no second one.
        await gateway.chat()
        assert gateway.dispatcher.prompt_text().startswith("<|im_start|>user")
        assert (await gateway.json("/tokenize", {"prompt": "ab"}))["count"] == 3
        assert (await gateway.json("/tokenize", {"prompt": "ab", "add_special_tokens": False}))["count"] == 2
