"""Two gateways that share sessions through a real Redis: a turn may land on either, whatever happens to Redis meanwhile."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass

import pytest
import redis as sync_redis

from tests.live_gateway import serve
from tests.redis_server import redis_server


@contextlib.contextmanager
def simulated_replica(model, socket):
    """A replica of our engine without a model: real cache, made-up tokens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "engine", "--model", str(model), "--uds", str(socket), "--simulate"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"unix:{socket}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


class Client:
    """One agent's session, whose turns are sent to the gateway of its choice."""

    def __init__(self, session):
        self.session = session
        self.messages = [{"role": "system", "content": "You are an agent. " * 40}]

    def turn(self, url, text):
        self.messages.append({"role": "user", "content": text})
        body = json.dumps({"messages": self.messages, "max_tokens": 24, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json", "Session-ID": self.session}
        with urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", body, headers), timeout=60) as answer:
            reply = json.load(answer)
            headers = dict(answer.headers)
        self.messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        return reply["usage"], headers


def metrics(url):
    text = urllib.request.urlopen(url + "/metrics", timeout=30).read().decode()
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    return values


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@dataclass
class Setting:
    redis: object
    socket: object
    one: object
    two: object

    def __iter__(self):
        return iter((self.redis, self.one, self.two))

    def replica(self, path):
        """What the replica itself answers."""
        connection = http.client.HTTPConnection("replica", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.socket))
        connection.request("GET", path)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer


@pytest.fixture(scope="module")
def setting(smollm2_dir, tmp_path_factory):
    with redis_server() as server:
        socket_path = tmp_path_factory.mktemp("sockets") / "replica.sock"
        arguments = ("--redis", server.url, "--redis-retry-interval", 0.1, "--redis-budget", 0.2, "--model", smollm2_dir)
        with simulated_replica(smollm2_dir, socket_path) as worker:
            with serve("--worker", worker, *arguments) as one, serve("--worker", worker, *arguments) as two:
                yield Setting(server, socket_path, one, two)


def test_turns_land_on_either_gateway_and_reuse_everything(setting):
    _, one, two = setting
    client = Client("alternating")
    left = 0
    for number in range(8):
        usage, headers = client.turn((one, two)[number % 2].url, f"And then, number {number}?")
        assert "X-Turnkeep-Miss" not in headers
        assert cached(usage) >= left // 16 * 16 - 16 * (number > 0)
        left = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    for gateway in (one, two):
        seen = metrics(gateway.url)
        # Made-up tokens do not come back from their text: only the ledger of the other gateway can know them.
        assert seen['turnkeep_gateway_history_tokens_total{source="spliced"}'] > 0
        assert seen['turnkeep_gateway_redis_events_total{event="remote"}'] >= 3
        assert seen["turnkeep_gateway_redis_up"] == 1


def test_redis_that_is_killed_frozen_or_emptied_is_nobody_s_error(setting):
    server, one, two = setting
    client = Client("troubled")
    client.turn(one.url, "begin")
    lines = [len([line for line in gateway.lines if "Redis" in line]) for gateway in (one, two)]
    server.kill()
    for number in range(6):
        usage, _ = client.turn((one, two)[number % 2].url, f"while it is dead, {number}")
        assert usage["completion_tokens"] > 0
    assert metrics(one.url)["turnkeep_gateway_redis_up"] == 0
    server.start()
    until(lambda: all(metrics(gateway.url)["turnkeep_gateway_redis_up"] == 1 for gateway in (one, two)))
    until(lambda: all(metrics(gateway.url)["turnkeep_gateway_redis_unsaved_sessions"] == 0 for gateway in (one, two)))
    for gateway, before in zip((one, two), lines, strict=True):
        said = [line for line in gateway.lines if "Redis" in line][before:]
        assert len(said) == 2, said  # gone, and back
    client.turn(one.url, "it is back")
    usage, headers = client.turn(two.url, "and is it known here?")
    assert "X-Turnkeep-Miss" not in headers
    with sync_redis.Redis(port=server.port) as redis:
        redis.flushall()
    for number in range(4):
        client.turn((one, two)[number % 2].url, f"after it was emptied, {number}")
    os.kill(server.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    for number in range(8):
        client.turn((one, two)[number % 2].url, f"while it is frozen, {number}")
    frozen = time.monotonic() - started
    os.kill(server.process.pid, signal.SIGCONT)
    assert frozen < 30
    until(lambda: all(metrics(gateway.url)["turnkeep_gateway_redis_up"] == 1 for gateway in (one, two)))
    for gateway in (one, two):
        seen = metrics(gateway.url)
        assert not any(name.startswith("turnkeep_gateway_turns_total") and 'status="5' in name for name in seen)


def test_tool_gaps_are_shared(setting):
    _, one, two = setting
    client = Client("with pauses")
    for number in range(4):
        client.turn(one.url, f"go on, {number}")

    def known(url):
        return json.load(urllib.request.urlopen(url + "/v1/tools/gaps", timeout=30))["data"]

    until(lambda: known(two.url))
    assert [row["tool"] for row in known(two.url)] == [None]
    assert known(two.url)[0]["weight"] > 3

    def waiting():
        return {entry["hint"]["session"]: entry["hint"] for entry in setting.replica("/v1/retain")["sessions"]}

    # What was learned on one gateway reaches the replica with a turn that the other served.
    client.turn(two.url, "on the other one")
    until(lambda: "with pauses" in waiting() and waiting()["with pauses"].get("return_p50"))
    hint = waiting()["with pauses"]
    assert 0 < hint["return_p50"] <= hint["return_p90"] < 60
    assert hint["weight"] > 3


def test_a_retry_is_one_generation_on_the_replica(setting):
    _, one, _ = setting
    client = Client("retried")
    client.turn(one.url, "begin")
    before = setting.replica("/v1/stats")["requests_total"]
    messages = [*client.messages, {"role": "user", "content": "Take your time."}]
    body = json.dumps({"messages": messages, "max_tokens": 400, "ignore_eos": True, "temperature": 1.0}).encode()
    headers = {"Content-Type": "application/json", "Session-ID": "retried"}
    answers = []

    def send():
        with urllib.request.urlopen(urllib.request.Request(one.url + "/v1/chat/completions", body, headers), timeout=60) as got:
            answers.append((json.load(got), got.headers.get("X-Turnkeep-Attached")))

    tries = [threading.Thread(target=send) for _ in range(3)]
    for thread in tries:
        thread.start()
    for thread in tries:
        thread.join(60)
    assert len({answer["id"] for answer, _ in answers}) == 1
    assert len({answer["choices"][0]["message"]["content"] for answer, _ in answers}) == 1
    assert sorted(attached is None for _, attached in answers) == [False, False, True]
    assert setting.replica("/v1/stats")["requests_total"] == before + 1
