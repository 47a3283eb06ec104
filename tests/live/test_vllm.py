"""The real vLLM as a worker: token ids, cache, streams, grammars and KV events through the gateway."""

import json
import sys
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI
from servers import free_port, program, started

sys.path.insert(0, str(Path(__file__).parents[1]))
from live_gateway import serve

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]
MODEL = "smol"
BLOCK = 32
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 5},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def adapter(smollm2_dir, tmp_path_factory):
    """A LoRA adapter with random weights, large enough to change what is said."""
    import torch
    from safetensors.torch import save_file

    directory = tmp_path_factory.mktemp("adapter")
    config = json.loads((smollm2_dir / "config.json").read_text())
    hidden, chance, weights = config["hidden_size"], torch.Generator().manual_seed(1), {}
    heads = {"q_proj": hidden, "v_proj": hidden // config["num_attention_heads"] * config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for name, width in heads.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, hidden, generator=chance) * 0.02
            weights[f"{at}.lora_B.weight"] = torch.randn(width, 8, generator=chance) * 0.5
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": list(heads)}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def vllm(smollm2_dir, adapter):
    """vLLM on this machine's processor, in float32, with KV events: (url, events, replay)."""
    command = program("TURNKEEP_VLLM", "vllm")
    port, events, replay = free_port(), free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    options = (
        *("serve", smollm2_dir, "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", port, "--dtype", "float32"),
        *("--max-model-len", 4096, "--block-size", BLOCK, "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--enable-lora", "--lora-modules", f"adapter={adapter}", "--max-lora-rank", 8),
        *("--kv-events-config", json.dumps(config)),
    )
    env = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    url = f"http://127.0.0.1:{port}"
    with started([command, *options], url + "/health", env=env, seconds=600):
        yield url, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"


@pytest.fixture(scope="module")
def gateway(vllm, smollm2_dir):
    url, events, replay = vllm
    worker = f"vllm={url},events={events},replay={replay}"
    models = ("--model", smollm2_dir, "--served-model-name", MODEL, "--also-serve", f"adapter={smollm2_dir}")
    with serve(*models, "--worker", worker) as served:
        yield served


@pytest.fixture(scope="module")
def client(gateway):
    return OpenAI(base_url=gateway.api, api_key="none", timeout=300, max_retries=0)


def metric(gateway, name):
    with urllib.request.urlopen(gateway.url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def chat(client, messages, **more):
    options = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, **more}
    return client.chat.completions.create(**options)


def test_token_ids_are_those_that_vllm_makes_alone(client, vllm):
    """The same prompt ids given to vLLM directly give the same ids back."""
    answer = chat(client, [{"role": "user", "content": "Name three rivers."}], extra_body={"return_token_ids": True})
    body = {
        "model": MODEL,
        "prompt": answer.prompt_token_ids,
        "temperature": 0,
        "max_tokens": 24,
        "return_token_ids": True,
        "repetition_penalty": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    request = urllib.request.Request(
        vllm[0] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as direct:
        alone = json.load(direct)["choices"][0]["token_ids"]
    through = answer.choices[0].token_ids
    print(f"\n{len(through)} token ids equal to vLLM's own: {through == alone}")
    assert through == alone
    assert len(through) == 24


def test_later_turns_find_their_prefix_and_the_index_knew(client, gateway):
    messages = [{"role": "system", "content": "You are a careful agent. " * 60}, {"role": "user", "content": "Say hello."}]
    for turn in range(4):
        promised, cached = (
            metric(gateway, "turnkeep_gateway_promised_tokens_total{"),
            metric(gateway, "turnkeep_gateway_cached_tokens_total{"),
        )
        answer = chat(client, messages, extra_headers={"Session-ID": "cached"})
        usage = answer.usage
        found = usage.prompt_tokens_details.cached_tokens
        promised = metric(gateway, "turnkeep_gateway_promised_tokens_total{") - promised
        cached = metric(gateway, "turnkeep_gateway_cached_tokens_total{") - cached
        print(f"\nturn {turn + 1}: {found} of {usage.prompt_tokens} prompt tokens cached, {promised:.0f} promised by the index")
        assert cached == found
        if turn:
            assert found >= usage.prompt_tokens - 3 * BLOCK
            assert promised == found
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "Go on."}]


def test_streams(client):
    messages = [{"role": "user", "content": "Count from one to ten."}]
    whole = chat(client, messages)
    stream = chat(client, messages, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    print(f"\n{len(chunks)} chunks, {chunks[-1].usage.completion_tokens} tokens")
    assert text == whole.choices[0].message.content
    assert len(chunks) > 10
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_call_obeys_its_schema(client, choice):
    answer = chat(
        client,
        [{"role": "user", "content": "Weather in Rome for 3 days?"}],
        tools=[TOOL],
        tool_choice=choice,
        max_tokens=200,
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    print(f"\n{call.function.name}({arguments})")
    assert call.function.name == "get_weather"
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 5
    assert set(arguments) == {"city", "days"}


def test_logprobs_choices_and_seeds(client):
    messages = [{"role": "user", "content": "Tell me a joke."}]
    answer = chat(client, messages, logprobs=True, top_logprobs=3, n=2, max_tokens=5)
    assert [len(each.logprobs.content) for each in answer.choices] == [5, 5]
    assert answer.choices[0].message.content == answer.choices[1].message.content
    for entry in answer.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
    once, again = (chat(client, messages, temperature=1.0, seed=7).choices[0].message.content for _ in range(2))
    assert once == again


def test_what_vllm_refuses_is_a_400(client, gateway):
    from openai import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError, match="'smol'"):
        chat(client, [{"role": "user", "content": "x"}], model="other")
    with pytest.raises(BadRequestError, match="context"):
        chat(client, [{"role": "user", "content": "word " * 6000}])
    assert metric(gateway, "turnkeep_gateway_worker_failures_total{") == 0


def test_a_client_that_leaves_ends_its_request_there(client, vllm):
    stream = chat(client, [{"role": "user", "content": "Write a very long story."}], max_tokens=2000, stream=True)
    next(iter(stream))
    stream.close()
    for _ in range(100):
        with urllib.request.urlopen(vllm[0] + "/metrics", timeout=10) as answer:
            text = answer.read().decode()
        running = sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{")
        )
        if running == 0:
            return
    pytest.fail("vLLM still runs a request whose client has left")


def test_adapters_and_salts_have_prefixes_of_their_own(client, gateway):
    """And the index knows them apart: what it promises is what is cached."""
    messages = [{"role": "system", "content": "You name rivers. " * 60}, {"role": "user", "content": "Name one."}]
    said, cached = [], []
    for model, salt in (
        (MODEL, None),
        ("adapter", None),
        (MODEL, None),
        ("adapter", None),
        (MODEL, "s"),
        (MODEL, "s"),
        (MODEL, "t"),
    ):
        before = metric(gateway, "turnkeep_gateway_promised_tokens_total{")
        answer = chat(client, messages, model=model, extra_body={"cache_salt": salt} if salt else None)
        promised = metric(gateway, "turnkeep_gateway_promised_tokens_total{") - before
        said.append(answer.choices[0].message.content)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert promised == cached[-1], (model, salt)
    print(f"\ncached, by model and salt: {cached}")
    whole = cached[2]
    assert whole >= 128
    assert cached == [0, 0, whole, whole, 0, whole, 0]
    assert said[0] == said[2] == said[4]
    assert said[1] == said[3] != said[0]
