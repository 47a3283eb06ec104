"""The real vllm-router (policy kv_aware) over our replicas: it reads our KV events and goes where a prompt is."""

import json
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from servers import free_port, program, started

sys.path.insert(0, str(Path(__file__).parents[1]))
from live_gateway import serve

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
MODEL = "smol"


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(answer.headers), json.load(answer)


def chat(url, messages):
    _, answer = post(url + "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0})
    return answer["choices"][0]["message"], answer["usage"]


def conversation(name):
    return [{"role": "system", "content": f"You are agent {name}. " * 60}, {"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def fleet(smollm2_dir):
    """Two gateways with a replica each that publishes KV events, and the router over them: (router, worker, worker)."""
    router = program("TURNKEEP_VLLM_ROUTER", "vllm-router")
    events = [(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}") for _ in range(2)]

    def options(number):
        publish, replay = events[number]
        return (
            *("--model", smollm2_dir, "--served-model-name", MODEL, "--replicas", 1, "--dtype", "float32"),
            *(
                "--engine",
                f"kv-events={publish}",
                "--engine",
                f"kv-replay={replay}",
                "--num-blocks",
                400,
                "--engine",
                "threads=1",
            ),
        )

    with serve(*options(0)) as one, serve(*options(1)) as two:
        urls = [one.url, two.url]
        port, prometheus = free_port(), free_port()
        command = [router, "--worker-urls", *urls, "--policy", "kv_aware", "--port", port, "--prometheus-port", prometheus]
        for url, (publish, replay) in zip(urls, events, strict=True):
            command += ["--kv-event-source", f"{url}={publish}", "--kv-event-replay-source", f"{url}={replay}"]
        command += ["--kv-event-model", MODEL, "--kv-event-block-size", 16]
        with started(command, f"http://127.0.0.1:{port}/health", seconds=60):
            yield f"http://127.0.0.1:{port}", *urls


def prompt_tokens(url):
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("turnkeep_gateway_prompt_tokens_total{"))


@pytest.mark.parametrize("home", [0, 1])
def test_the_router_goes_where_the_prompt_is(fleet, home):
    """A conversation begins directly at one worker; the router has never seen it, and still finds it there."""
    router, *workers = fleet
    messages = conversation(f"of worker {home}")
    said, usage = chat(workers[home], messages)
    assert usage["prompt_tokens_details"]["cached_tokens"] < 32
    messages += [said, {"role": "user", "content": "And again."}]
    time.sleep(1.0)  # the router says nothing that could be waited for when it has read an event
    before = [prompt_tokens(url) for url in workers]
    _, usage = chat(router, messages)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"\nsecond turn through vllm-router: {cached} of {usage['prompt_tokens']} prompt tokens cached")
    assert cached >= usage["prompt_tokens"] - 64
    grown = [after > was for after, was in zip(map(prompt_tokens, workers), before, strict=True)]
    assert grown == [number == home for number in range(2)]


def test_whole_sessions_through_the_router(fleet):
    router, *_ = fleet
    for name in ("a", "b", "c"):
        messages = conversation(name)
        for turn in range(3):
            said, usage = chat(router, messages)
            if turn:
                assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 64
            messages += [said, {"role": "user", "content": "Go on."}]
            time.sleep(0.5)


def test_rendered_prompts_are_the_prompts_of_turns(fleet):
    _, worker, _ = fleet
    _, rendered = post(worker + "/v1/chat/completions/render", {"model": MODEL, "messages": conversation("r")})
    _, answer = post(
        worker + "/v1/chat/completions",
        {"model": MODEL, "messages": conversation("r"), "max_tokens": 1, "return_token_ids": True},
    )
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    _, plain = post(worker + "/v1/completions/render", {"model": MODEL, "prompt": [[5, 6], [7]]})
    assert [entry["token_ids"] for entry in plain] == [[5, 6], [7]]
