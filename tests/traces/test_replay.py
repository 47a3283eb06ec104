"""Replay against a server whose latencies and cache are known."""

from __future__ import annotations

import asyncio
import time
from array import array

import numpy as np
import pytest
from aiohttp import web
from fake_openai_server import FakeServer, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from trace_files import TOOLS, write_trace

from traces.chat_client import Answer, ChatClient, ChatError, normalise_url
from traces.replay import Goodput, Replay, ReplayConfig, ReplayResult, choose_model, open_http
from traces.report import Run, table, to_json
from traces.samples import Samples
from traces.unlimited_cache import Bound, GivenAnswers, TooManyBlocks, UnlimitedCache, unlimited_bound


async def run(url, entries, **config):
    config = ReplayConfig(**config)
    async with open_http(config.concurrency) as http:
        return await Replay(config, [ChatClient(http, url)]).run(entries)


async def test_order_history_and_forced_lengths(tmp_path, serve):
    fake = FakeServer()
    entries = write_trace(tmp_path / "t.jsonl", sessions=5)
    result = await run(await serve(fake), entries, concurrency=2, model="fake", session_prefix="run1-")
    assert (result.sessions, result.completed, result.failed, result.turns) == (5, 20, 0, 20)
    assert fake.most_running == 2
    for session in range(5):
        mine = [body for body, name in zip(fake.bodies, fake.sessions, strict=True) if name == f"run1-s{session}"]
        assert [len(body["messages"]) for body in mine] == [2, 4, 6, 8]
        roles = [message["role"] for message in mine[-1]["messages"]]
        assert roles == ["system", "user", *["assistant", "tool"] * 3]
        assert mine[-1]["messages"][2]["content"] == "recorded 0"
        assert mine[-1]["tools"] == list(TOOLS)
    shape = {key: value for key, value in fake.bodies[0].items() if key not in ("messages", "tools")}
    assert shape == {
        "model": "fake",
        "temperature": 0.5,
        "max_tokens": 6,
        "min_tokens": 6,
        "tool_choice": "none",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert result.output_tokens == 20 * 6
    assert result.prompt_tokens == sum(len(tokens_of(body)) for body in fake.bodies)
    assert result.workers == {"fake-0": 20}


async def test_free_sends_what_was_recorded(tmp_path, serve):
    fake = FakeServer()
    await run(await serve(fake), write_trace(tmp_path / "t.jsonl", 1, 1), forced=False)
    body = fake.bodies[0]
    assert (body["model"], body["tool_choice"], body["stop"], body["max_tokens"]) == ("recorded", "required", ["x"], 99)
    assert "min_tokens" not in body


async def test_latencies_are_measured(tmp_path, serve):
    fake = FakeServer(first=0.08, between=0.02)
    entries = write_trace(tmp_path / "t.jsonl", sessions=1, turns=3, output_tokens=5)
    result = await run(await serve(fake), entries, goodput=Goodput(ttft=10_000, tpot=1))
    assert result.ttft.count == 3
    assert result.ttft.percentile(0) >= 0.08
    assert result.ttft.percentile(50) < 0.4
    assert result.itl.count == 3 * 4
    assert 0.019 <= result.itl.percentile(50) < 0.2
    assert result.e2el.percentile(0) >= 0.08 + 4 * 0.019
    assert result.tpot.mean == pytest.approx((result.e2el.mean - result.ttft.mean) / 4)
    assert result.duration >= 3 * 0.156
    assert result.good == 0


async def test_gaps_are_kept_scaled_or_left_out(tmp_path, serve):
    entries = write_trace(tmp_path / "t.jsonl", sessions=2, turns=3, gap=0.4)
    url = await serve(FakeServer())
    took = {}
    for scale in (1.0, 0.5, 0.0):
        started = time.perf_counter()
        await run(url, entries, gap_scale=scale)
        took[scale] = time.perf_counter() - started
    assert took[1.0] >= 0.8
    assert 0.4 <= took[0.5] < took[1.0]
    assert took[0.0] < 0.4


async def bound_of(url, entries, answers=None):
    async with open_http(1) as http:
        return await unlimited_bound(ChatClient(http, url), entries, answers, model="fake")


async def test_cached_share_reaches_the_bound_on_an_unlimited_cache(tmp_path, serve):
    entries = write_trace(tmp_path / "t.jsonl", sessions=6, turns=5)
    url = await serve(FakeServer())
    result = await run(url, entries, concurrency=1)
    bound = await bound_of(url, entries)
    assert bound.turns == 30
    assert result.prompt_tokens == bound.prompt_tokens
    assert result.cached_tokens == bound.cached_tokens
    assert 0.5 < result.cached_share < 1
    assert Run("x", result, bound).share_of_unlimited == 1.0


async def test_answers_that_repeat_the_record_belong_to_the_bound(tmp_path, serve):
    """The recorded text is long, and the server generates just that: a cache that keeps answers beats prompts alone."""
    entries = write_trace(tmp_path / "t.jsonl", sessions=3, turns=4, answer="as recorded " * 20)
    fake = FakeServer(answer=lambda body: (["as recorded "] * 20, []), keeps_answers=True)
    url = await serve(fake)
    result = await run(url, entries, concurrency=1)
    prompts_alone = await bound_of(url, entries)
    bound = await bound_of(url, entries, result.answers)
    assert result.cached_tokens == bound.cached_tokens > prompts_alone.cached_tokens


def test_answers_are_kept_in_bounded_memory():
    answers = GivenAnswers(max_bytes=100)
    answers.add("s", 0, {"role": "assistant", "content": "a"})
    answers.add("s", 1, {"role": "assistant", "content": "b" * 100})
    assert answers.get("s", 0) == {"role": "assistant", "content": "a"}
    assert answers.get("s", 1) is None
    assert not answers.complete


@given(st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=12), st.integers(1, 4))
def test_unlimited_cache_equals_brute_force(prompts, block_size):
    """Against the definition: the longest run of whole blocks that some earlier prompt begins with, one token computed."""
    cache = UnlimitedCache(block_size)
    for number, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:number]:
            common = 0
            while common < min(len(prompt), len(earlier)) and prompt[common] == earlier[common]:
                common += 1
            # A block is in the cache only if the earlier prompt filled it.
            best = max(best, common // block_size * block_size)
        best = min(best, max(0, len(prompt) - 1) // block_size * block_size)
        assert cache.add(prompt) == best


def test_the_unlimited_cache_is_bounded():
    cache = UnlimitedCache(block_size=1, max_blocks=10)
    with pytest.raises(TooManyBlocks, match="more than 10 distinct blocks of 1 tokens"):
        cache.add(list(range(11)))


async def test_several_servers_share_the_sessions(tmp_path, serve):
    fakes = [FakeServer(), FakeServer()]
    entries = write_trace(tmp_path / "t.jsonl", sessions=4, turns=2)
    async with open_http(4) as http:
        clients = [ChatClient(http, await serve(fake)) for fake in fakes]
        result = await Replay(ReplayConfig(concurrency=4), clients).run(entries)
    assert result.completed == 8
    assert [set(fake.sessions) for fake in fakes] == [{"s0", "s2"}, {"s1", "s3"}]


async def test_failures_are_counted_and_the_session_goes_on(tmp_path, serve):
    def answer(body):
        if len(body["messages"]) == 4:
            raise web.HTTPServiceUnavailable(
                text='{"error": {"message": "all replicas are busy"}}', content_type="application/json"
            )
        return ["a"], []

    fake = FakeServer(answer=answer)
    result = await run(await serve(fake), write_trace(tmp_path / "t.jsonl", sessions=2, turns=3), concurrency=1)
    assert (result.completed, result.failed) == (4, 2)
    assert result.errors == [f"session s{s}, turn 1: HTTP 503: all replicas are busy" for s in (0, 1)]
    assert Run("x", result, Bound(6, 100, 50)).share_of_unlimited is None


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("error", "the stream ended with an error: the worker died"),
        ("garbage", "the stream held an event that is no JSON"),
        ("cut", r"the stream ended without \[DONE\]"),
    ],
)
async def test_a_broken_stream_is_a_failure(serve, how, sentence):
    url = await serve(FakeServer(break_stream=how))
    async with open_http(1) as http:
        with pytest.raises(ChatError, match=sentence):
            await ChatClient(http, url).chat({"model": "m", "messages": []})


async def test_a_server_that_is_not_there(unused_tcp_port_url):
    async with open_http(1) as http:
        client = ChatClient(http, unused_tcp_port_url)
        with pytest.raises(ChatError, match="cannot connect"):
            await client.models()
        with pytest.raises(ChatError, match="cannot connect"):
            await client.chat({"model": "m", "messages": []})


async def test_a_silent_server(serve):
    url = await serve(FakeServer(first=5))
    async with open_http(1) as http:
        with pytest.raises(ChatError, match="was silent for too long"):
            await ChatClient(http, url, timeout=0.1).chat({"model": "m", "messages": []})


@pytest.fixture
def unused_tcp_port_url():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}"


async def test_tool_calls_are_assembled(serve):
    fake = FakeServer(answer=lambda body: ([], [("look", '{"at":"é"}'), ("go", "{}")]))
    async with open_http(1) as http:
        answer = await ChatClient(http, await serve(fake)).chat({"model": "m", "messages": []})
    assert answer.message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"at":"é"}'}},
            {"id": "call_1", "type": "function", "function": {"name": "go", "arguments": "{}"}},
        ],
    }
    assert (answer.finish_reason, answer.pieces, answer.completion_tokens) == ("tool_calls", 6, 10)


async def test_model_is_the_recorded_one_where_the_server_has_it(tmp_path, serve):
    entries = write_trace(tmp_path / "t.jsonl")
    async with open_http(1) as http:
        assert await choose_model(ChatClient(http, await serve(FakeServer(models=("a", "recorded")))), entries) == "recorded"
        assert await choose_model(ChatClient(http, await serve(FakeServer(models=("a", "b")))), entries) == "a"
        with pytest.raises(ChatError, match="names no model"):
            await choose_model(ChatClient(http, await serve(FakeServer(models=()))), entries)


async def test_cancelling_leaves_nothing_running(tmp_path, serve):
    fake = FakeServer(first=30)
    url = await serve(fake)
    task = asyncio.create_task(run(url, write_trace(tmp_path / "t.jsonl"), concurrency=3))
    await asyncio.wait_for(fake.three_running.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [name for name in map(str, asyncio.all_tasks()) if "_worker" in name] == []


def answer_of(ttft, gaps, *, completion=None, prompt=100, cached=64, duration=None):
    return Answer(
        started=0.0,
        duration=ttft + sum(gaps) if duration is None else duration,
        time_to_first_token=ttft,
        gaps=array("d", gaps),
        pieces=len(gaps) + 1,
        completion_tokens=completion,
        prompt_tokens=prompt,
        cached_tokens=cached,
    )


def test_figures_from_known_answers():
    result = ReplayResult(goodput=Goodput.parse(["ttft:300", "tpot:50"]), duration=10.0)
    for ttft in (0.1, 0.2, 0.3, 0.4):
        result.take(answer_of(ttft, [0.02, 0.04], completion=3))
    result.take(answer_of(0.25, [0.2, 0.2], completion=3))
    values = to_json(Run("r", result, Bound(5, 500, 400)))
    assert values["completed"] == 5
    assert values["total_input_tokens"] == 500
    assert values["total_output_tokens"] == 15
    assert values["request_goodput"] == pytest.approx(0.3)  # 0.4 s is late, 0.2 s a token is slow
    assert values["output_throughput"] == 1.5
    assert values["total_token_throughput"] == 51.5
    assert values["median_ttft_ms"] == pytest.approx(250)
    assert values["p90_ttft_ms"] == pytest.approx(360)
    assert values["p99_ttft_ms"] == pytest.approx(396)
    assert values["mean_tpot_ms"] == pytest.approx((4 * 30 + 200) / 5)
    assert values["median_itl_ms"] == pytest.approx(40)
    assert values["std_ttft_ms"] == pytest.approx(np.std([100, 200, 300, 400, 250]))
    assert values["cached_share"] == 0.64
    assert values["share_of_unlimited"] == 0.8


def test_unknown_figures_are_not_made_up():
    result = ReplayResult(duration=1.0)
    result.take(answer_of(0.1, []))
    result.take(answer_of(0.1, [], cached=None))
    values = to_json(Run("r", result))
    assert (values["cached_share"], values["cached_tokens"], values["share_of_unlimited"]) == (None, None, None)
    assert values["request_goodput"] is None
    assert values["total_output_tokens"] == 2


def test_the_table_compares_runs(capsys):
    from rich.console import Console

    first, second = ReplayResult(duration=10.0), ReplayResult(duration=5.0)
    first.take(answer_of(0.4, [0.02], cached=40))
    second.take(answer_of(0.1, [0.02], cached=80))
    Console(width=100).print(table([Run("round robin", first), Run("prefix", second)]))
    rows = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in lines(capsys)}
    assert rows["TTFT p90"] == ["400 ms", "100 ms", "0.25×"]
    assert rows["cached share"] == ["40.0%", "80.0%", "2.00×"]
    assert rows["tokens/s"] == ["10.2", "20.4", "2.00×"]
    assert "share of unlimited" not in rows
    assert "failed" not in rows


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100]))
def test_samples_agree_with_numpy(values, q):
    samples = Samples()
    samples.extend(values)
    assert samples.percentile(q) == pytest.approx(np.percentile(values, q))
    assert samples.mean == pytest.approx(np.mean(values))
    assert samples.std == pytest.approx(np.std(values), abs=1e-6)


def test_samples_are_bounded_and_stay_fair():
    samples = Samples(max_kept=500)
    samples.extend(float(value) for value in range(20_000))
    assert samples.count == 20_000
    assert len(samples._kept) == 500
    assert samples.mean == pytest.approx(9999.5)
    assert samples.percentile(50) == pytest.approx(10_000, rel=0.1)


def test_bad_options_are_sentences():
    with pytest.raises(ValueError, match="'ttft' is no goodput limit"):
        Goodput.parse(["ttft"])
    with pytest.raises(ValueError, match="'tpot:-1' is no goodput limit"):
        Goodput.parse(["tpot:-1"])
    with pytest.raises(ValueError, match="is no URL of a server"):
        normalise_url("localhost:8000")
    assert normalise_url("http://h:1/v1/") == "http://h:1"
    with pytest.raises(ValueError, match="at least one server"):
        Replay(ReplayConfig(), [])
