"""The life of `turnkeep serve`: what it says, how it ends, why it refuses to start."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import openai
import pytest

SIMULATED = ("--simulate", "--served-model-name", "m")


def run(*arguments, timeout=120):
    """The command to its end: (exit code, what it printed)."""
    result = subprocess.run(
        [sys.executable, "-m", "cli.main", "serve", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def test_the_example_it_prints_works(start_gateway, smollm2_dir):
    with start_gateway("--model", smollm2_dir, *SIMULATED, "--engine", "sim-time-scale=0") as served:
        for _ in range(100):
            text = "".join(served.lines)
            example = re.search(r"^curl .*?\]\}'$", text, re.M | re.S)
            if example:
                break
            time.sleep(0.05)
        result = subprocess.run(["bash", "-c", example[0]], capture_output=True, text=True, check=True, timeout=60)
        assert '"chat.completion"' in result.stdout
        assert served.stop() == 0
    assert any("Stopping" in line for line in served.lines)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_warns_of_nothing(start_gateway, smollm2_dir, processes):
    options = ("--replicas", 2, "--processes", processes, "--engine", "sim-time-scale=0")
    with start_gateway("--model", smollm2_dir, *SIMULATED, *options) as served:
        with openai.OpenAI(base_url=served.api, api_key="x", max_retries=0) as client:
            for number in range(4):  # so that the replicas have had something to tell
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{number}"}], max_tokens=20)
        assert served.stop() == 0
    # All that was said is here only when the reader has ended, which leaving the block waits for.
    said = "".join(served.lines).partition("Stopping")[2]
    assert "shutting down" in said
    assert "KV events" not in said, "who is left before it goes is not missed"
    assert not [line for line in said.splitlines() if "WARNING" in line or "ERROR" in line or "Traceback" in line]


async def test_a_signal_lets_streams_finish_and_leaves_nothing_behind(start_gateway, smollm2_dir):
    with start_gateway("--model", smollm2_dir, *SIMULATED, "--engine", "sim-time-scale=5") as served:
        children = _children(served.process.pid)
        assert children
        async with openai.AsyncOpenAI(base_url=served.api, api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "a"}],
                max_tokens=60,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunks = [await anext(stream)]
            served.process.send_signal(signal.SIGTERM)
            chunks += [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert await asyncio.to_thread(served.process.wait, 60) == 0
    assert not [pid for pid in children if _alive(pid)]


def test_a_replica_that_is_killed_comes_back(start_gateway, smollm2_dir):
    with start_gateway("--model", smollm2_dir, *SIMULATED) as served:
        [child] = _children(served.process.pid)
        os.kill(child, signal.SIGKILL)
        _until(lambda: _ready(served.url) == 503)
        _until(lambda: _ready(served.url) == 200)
        assert _children(served.process.pid) != [child]
        log = "".join(served.lines)
        assert "replica-0 died" in log
        assert "SIGKILL" in log


def test_a_port_in_use(smollm2_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = run("--model", smollm2_dir, *SIMULATED, "--port", port)
    assert code == 1
    assert f"Error: Port {port} on 127.0.0.1 is in use. Choose another with --port (0 takes a free one)." in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model", "/nowhere/at/all"), 1, "There is no model /nowhere/at/all"),
        (("--model", "{empty}"), 1, "config.json"),
        (("--record", "/proc/nowhere", *SIMULATED), 1, "cannot be recorded in /proc/nowhere"),
        (("--replicas", "-1"), 2, "range"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path, smollm2_dir, arguments, code, words):
    arguments = [argument.format(empty=tmp_path) for argument in arguments]
    if "--model" not in arguments:
        arguments += ["--model", smollm2_dir]
    returned, output = run("--port", 0, *arguments)
    assert returned == code
    assert words in output
    assert "Traceback" not in output


def test_a_truncated_shard_is_named(tmp_path, tiny_checkpoint):
    directory = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint("llama"), directory)
    shard = directory / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    code, output = run("--model", directory, "--port", 0)
    assert code == 1
    assert "model.safetensors" in output
    assert "Traceback" not in output


def test_a_replica_that_cannot_start_ends_the_gateway(smollm2_dir):
    code, output = run("--model", smollm2_dir, "--port", 0, "--simulate", "--kv-memory", "1GiB")
    assert code == 1, output
    assert "replica-0 died once before it was ready" in output
    assert "A simulated replica has no KV memory to size" in output
    assert "Traceback" not in output


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _ready(url):
    try:
        return urllib.request.urlopen(url + "/ready", timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code


def _until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
