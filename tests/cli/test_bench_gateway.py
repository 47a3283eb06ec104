"""`turnkeep bench gateway` against its own gateway and a stand-in for another router."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cli.gateway_bench.load import LoadConfig, LoadError
from cli.gateway_bench.peer import bare_proxy
from cli.gateway_bench.run import run
from cli.gateway_bench.sides import Side, cpu_seconds, foreign_side


@pytest.fixture
def stand_in():
    process = subprocess.Popen([sys.executable, "-m", "cli.gateway_bench.backend", "0"], stdout=subprocess.PIPE, text=True)
    try:
        ready, port = process.stdout.readline().split()
        assert ready == "ready"
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_measures_every_side(smollm2_dir, stand_in, tmp_path):
    url, _ = stand_in
    figures = tmp_path / "figures.json"
    options = ["--sessions", "3", "--at-once", "2", "--turns", "22", "--words", "60", "--replicas", "1", "--vs", f"other={url}"]
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "bench", "gateway", "--model", smollm2_dir, *options, "--json", figures],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    own, bare, other = json.loads(figures.read_text())
    assert (own["name"], bare["name"], other["name"]) == ("turnkeep", "bare proxy", "other")
    assert own["turns"] == bare["turns"] == other["turns"] == 66
    assert 0 < bare["cpu_ms"] < 1000
    assert bare["stages_ms"] == {}
    assert own["turns_per_second_at_the_end"] > 0
    assert set(own["stages_ms"]) == {"parse", "identity", "ledger", "route", "proxy"}
    assert 0 < own["cpu_ms"] < 1000
    assert own["cached_share"] > 0.5
    assert own["prompt_tokens_last"] > 240
    assert own["body_bytes_by_turn"]["1"] < own["body_bytes_by_turn"]["22"]
    assert other["cpu_ms"] > 0
    assert other["stages_ms"] == {}
    for word in ("turnkeep, ms by stage: parse", "other", "RSS MiB", "growth from turn 20 to turn 22"):
        assert word in done.stdout


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bare_proxy_passes_on_what_it_is_sent(stream):
    config = LoadConfig(sessions=2, turns=3, words=20, stream=stream)
    async with bare_proxy() as side:
        (report,) = await run(config, [side], lambda turn: None)
        pid = side.pid
    assert [turn.turn for turn in report.turns] == [1, 1, 2, 2, 3, 3]
    assert all(turn.prompt_tokens == turn.body_bytes // 5 for turn in report.turns if not stream)
    assert report.cpu_ms() > 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_side_is_known_by_who_listens(stand_in):
    url, pid = stand_in
    side = foreign_side(url)
    assert side.pid == pid
    assert side.rss() > 2**20
    assert cpu_seconds(pid) > 0
    with pytest.raises(ValueError, match="is no router"):
        foreign_side("localhost")


async def test_conversations_take_turns_together():
    here, most, seen = 0, 0, []
    together = asyncio.Barrier(2)

    async def answer(request):
        nonlocal here, most
        here += 1
        most = max(most, here)
        seen.append((request.headers["X-Session-ID"], len((await request.json())["messages"])))
        await together.wait()
        here -= 1
        return web.json_response({"choices": [{"message": {"content": "yes"}}], "usage": {"prompt_tokens": 7}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        side = Side("other", str(server.make_url("")).rstrip("/"), None)
        (report,) = await run(LoadConfig(sessions=4, turns=2, words=5, at_once=2), [side], lambda turn: None)
    assert most == 2
    # A system prompt and a question, then an answer and another question.
    assert sorted(seen) == sorted((f"other-{number}", 2 + 2 * turn) for number in range(4) for turn in range(2))
    assert report.turns_per_second([2]) == pytest.approx(4 / report.seconds[2])


async def test_a_pause_comes_before_every_turn():
    came = []

    async def answer(request):
        came.append(time.monotonic())
        return web.json_response({"choices": [{"message": {"content": "yes"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        side = Side("other", str(server.make_url("")).rstrip("/"), None)
        began = time.monotonic()
        await run(LoadConfig(sessions=2, turns=2, words=5, pause=0.05), [side], lambda turn: None)
    assert len(came) == 4
    assert all(after - before >= 0.05 for before, after in itertools.pairwise([began, *came]))


async def test_the_first_failure_is_told():
    async def refuse(request):
        return web.json_response({"error": "no"}, status=500)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", refuse)
    async with TestServer(app) as server:
        side = Side("other", str(server.make_url("")).rstrip("/"), None)
        with pytest.raises(LoadError, match="answered 500"):
            await run(LoadConfig(sessions=2, turns=1, at_once=2), [side], lambda turn: None)
