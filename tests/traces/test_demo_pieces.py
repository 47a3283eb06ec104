"""The demo over a fake gateway: what it shows, and that nothing it started outlives it, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fake_openai_server import FakeServer
from rich.console import Console
from trace_files import write_trace

from cli.demo import DemoConfig, run_demo
from cli.gateway_process import GatewayError, GatewayProcess
from traces.chat_client import ChatClient, ChatError
from traces.progress import ReplayProgress
from traces.replay import Replay, ReplayConfig, ReplayResult, open_http
from traces.report import Run
from traces.sample_tasks import TASKS, SampleTask
from traces.unlimited_cache import Bound
from traces.verdict import verdict

HERE = Path(__file__).parent


def command(folder, mode="well"):
    return [sys.executable, str(HERE / "fake_serve.py"), str(folder), mode]


def started(folder):
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


def running(folder):
    """Which of the processes that wrote down their ids are still there (a zombie is not)."""
    alive = []
    for pid in started(folder):
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
        except psutil.NoSuchProcess:
            continue
    return alive


def gone(folder, timeout=10.0):
    processes = []
    for pid in started(folder):
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=timeout)
    return running(folder) == []


@pytest.mark.parametrize("mode", ["well", "stubborn", "forgetful"])
async def test_a_gateway_is_ready_inside_and_gone_outside(tmp_path, mode):
    lines = []
    async with GatewayProcess(command(tmp_path, mode), stop_timeout=1.0, on_line=lines.append) as gateway, open_http(1) as http:
        assert await ChatClient(http, gateway.url).models() == ["fake"]
        assert len(running(tmp_path)) == 2
    assert gone(tmp_path)
    assert "loading" in lines


async def test_a_gateway_that_ends_says_why(tmp_path):
    with pytest.raises(GatewayError, match=r"(?s)ended with status 3 before it was ready.*no model here"):
        async with GatewayProcess(command(tmp_path, "dies")):
            pass
    assert gone(tmp_path)


async def test_a_gateway_that_never_is_ready(tmp_path):
    gateway = GatewayProcess(command(tmp_path, "hangs"), start_timeout=3.0, stop_timeout=1.0)
    with pytest.raises(GatewayError, match=r"(?s)was not ready after 3 s.*loading"):
        async with gateway:
            pass
    assert gone(tmp_path)
    with pytest.raises(GatewayError, match="is not ready"):
        _ = gateway.url


async def test_a_command_that_is_none(tmp_path):
    with pytest.raises(GatewayError, match=r"(?s)ended with status 127.*cannot run /no/such/thing"):
        async with GatewayProcess(["/no/such/thing"]):
            pass


def short_task():
    task = TASKS[0]
    return SampleTask(task.name, task.kind, task.task, task.steps[:5])


async def test_the_demo_shows_an_agent_and_compares_two_policies(tmp_path):
    write_trace(tmp_path / "t.jsonl", sessions=2, turns=3)
    policies = []

    def serve(policy):
        policies.append(policy)
        return command(tmp_path)

    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: ASYNC230, SIM115
    runs = await run_demo(DemoConfig(serve=serve, task=short_task(), traces=[tmp_path / "t.jsonl"]), console)
    assert policies == ["prefix", "round_robin", "prefix"]
    assert [(run.name, run.result.completed, run.result.failed) for run in runs] == [
        ("round robin", 6, 0),
        ("prefix-aware", 6, 0),
    ]
    assert all(run.share_of_unlimited is not None for run in runs)
    shown = console.export_text()
    assert '→ show_ticket {"number":1}**' in shown
    assert "← #1 Free shipping missing at exactly 39 EUR" in shown
    assert "a script chose the tool" in shown
    assert "MCP servers over stdio: repo, tickets; 9 tools" in shown
    assert "“www" in shown
    assert len(started(tmp_path)) == 6
    assert gone(tmp_path)


async def test_an_agent_whose_model_fails_ends_the_demo_in_order(tmp_path):
    write_trace(tmp_path / "t.jsonl", sessions=1, turns=1)
    config = DemoConfig(serve=lambda policy: command(tmp_path, "broken"), task=short_task(), traces=[tmp_path / "t.jsonl"])
    with pytest.raises(ChatError, match="the worker died"):
        await run_demo(config, Console(quiet=True))
    assert gone(tmp_path)


async def test_a_demo_that_is_cancelled_leaves_nothing(tmp_path):
    write_trace(tmp_path / "t.jsonl", sessions=1, turns=1)
    config = DemoConfig(serve=lambda policy: command(tmp_path, "hangs"), task=short_task(), traces=[tmp_path / "t.jsonl"])
    task = asyncio.create_task(run_demo(config, Console(quiet=True)))
    async with asyncio.timeout(30):
        while not started(tmp_path):  # noqa: ASYNC110 - another process writes the file
            await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(tmp_path)


OWNER = """
import asyncio, sys
sys.path.insert(0, {here!r})
from cli.gateway_process import GatewayProcess
async def main():
    async with GatewayProcess({command!r}) as gateway:
        print("up", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_gateway_does_not_outlive_its_owner(tmp_path, number):
    source = OWNER.format(here=str(HERE), command=command(tmp_path))
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert owner.stdout.readline() == "up\n"
        gateway = started(tmp_path)[0]
        owner.send_signal(number)
        owner.wait(30)
        # After a kill the kernel ends the gateway; its replicas bind themselves to it in the same way.
        psutil.wait_procs([psutil.Process(gateway)] if psutil.pid_exists(gateway) else [], timeout=10)
        assert gateway not in running(tmp_path)
        if number == signal.SIGINT:
            assert gone(tmp_path)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        for pid in running(tmp_path):
            psutil.Process(pid).kill()


def result_of(cached, ttft, duration, **changes):
    result = ReplayResult(completed=4, prompt_tokens=1000, cached_tokens=cached, turns_with_cached_tokens=4, duration=duration)
    result.ttft.extend(ttft)
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def test_the_verdict_is_computed():
    bound = Bound(4, 1000, 800)
    base = Run("round robin", result_of(500, [1.0, 2.0, 3.0], 40.0), bound)
    better = Run("prefix-aware", result_of(796, [0.25, 0.5, 0.75], 20.0), bound)
    assert verdict(base, better) == (
        "With prefix-aware routing 79.6% of the prompt tokens were cached (99.5% of what one unlimited cache would give), with "
        "round robin 50.0%: 204 tokens had to be computed instead of 500. Its median first token came after 500 ms instead of "
        "2.00 s, its 90th percentile first token came after 700 ms instead of 2.80 s, and the whole replay took 20 s instead "
        "of 40 s."
    )
    failed = verdict(base, Run("prefix-aware", result_of(796, [], 20.0, failed=1), bound))
    assert failed == (
        "With prefix-aware routing 79.6% of the prompt tokens were cached, with round robin 50.0%. "
        "The whole replay took 20 s instead of 40 s."
    )
    unknown = verdict(base, Run("prefix-aware", result_of(0, [], 0.0, turns_with_cached_tokens=0)))
    assert unknown == "How much came from a cache is not known: not every answer said so."


async def test_progress_where_there_is_no_terminal(tmp_path, serve, monkeypatch):
    monkeypatch.setattr("traces.progress.SECONDS_BETWEEN_LINES", 0.0)
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: ASYNC230, SIM115
    entries = write_trace(tmp_path / "t.jsonl", sessions=1, turns=2)
    async with open_http(1) as http:
        with ReplayProgress(console, "here", 2) as progress:
            replay = Replay(ReplayConfig(), [ChatClient(http, await serve(FakeServer()))], lambda: progress.turn(replay))
            await replay.run(entries)
    lines = console.export_text().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("here: 2/2 turns, ")
    assert "% cached, " in lines[1]
    assert lines[1].endswith(" tokens/s")


async def test_progress_on_a_terminal(tmp_path, serve):
    console = Console(record=True, width=120, force_terminal=True, file=open(os.devnull, "w"))  # noqa: ASYNC230, SIM115
    entries = write_trace(tmp_path / "t.jsonl", sessions=1, turns=2)
    async with open_http(1) as http:
        with ReplayProgress(console, "here", 2) as progress:
            client = ChatClient(http, await serve(FakeServer(break_stream="error")))
            replay = Replay(ReplayConfig(), [client], lambda: progress.turn(replay))
            await replay.run(entries)
            progress._bar.refresh()
    assert "2/2" in console.export_text()
    assert replay.result.failed == 2
