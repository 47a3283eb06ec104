"""One gateway in several processes: what a client sees of it is one gateway."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse

import pytest

from tests.live_gateway import serve

PROCESSES = 3


@pytest.fixture(scope="module")
def gateway():
    options = ("--simulate", "--replicas", 2, "--num-blocks", 2000, "--processes", PROCESSES)
    with serve(*options, "--http-ping-interval", 1) as gateway:
        yield gateway


def ask(gateway, method, path, body=None, headers=None):
    """On a connection of its own, which may go to any process."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(gateway.url).netloc, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def chat(gateway, messages, session=None, **body):
    headers = {} if session is None else {"Session-ID": session}
    status, headers, raw = ask(
        gateway, "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 12, **body}, headers
    )
    assert status == 200, raw
    return json.loads(raw), headers


def metric(gateway, name, **labels):
    text = ask(gateway, "GET", "/metrics")[2].decode()
    wanted = "".join(f'(?=.*{key}="{value}")' for key, value in labels.items())
    return [float(value) for value in re.findall(rf"^{name}(?:\{{{wanted}.*\}})? (\S+)$", text, re.MULTILINE)]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids(gateway, kind):
    """Of the last lives of processes or replicas."""
    found = {}
    for line in list(gateway.lines):
        if match := re.search(rf"({kind}-\d+) is up \(pid (\d+)", line):
            found[match[1]] = int(match[2])
    return found


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="processes share sessions through redis-server")
def test_a_session_is_one_session_whichever_process_has_its_turns(gateway):
    before = sum(metric(gateway, "turnkeep_gateway_turns_total", status="200"))
    messages = [{"role": "system", "content": "You are an agent. " * 30}]
    sources = []
    for number in range(10):
        messages.append({"role": "user", "content": f"step {number}"})
        answer, headers = chat(gateway, messages, session="work")
        messages.append(answer["choices"][0]["message"])
        sources.append((headers["X-Turnkeep-Replica"], "X-Turnkeep-Miss" in headers))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > (0 if number == 0 else 100) - 1
    assert len({replica for replica, _ in sources}) == 1
    assert not any(missed for _, missed in sources)
    session = json.loads(ask(gateway, "GET", "/v1/sessions/work")[2])
    assert session["turns"] == 10
    # What was generated came back as the ids that were generated, also where another process had them.
    generated, last = session["tokens"]["generated"], answer["usage"]["completion_tokens"]
    # All but the last answer, which nobody sent back yet, and ends of turn, which the template writes itself.
    assert generated - last - 9 <= session["tokens"]["spliced"] <= generated - last
    # What all processes did is one number, on whichever is asked.
    for _ in range(5):
        assert sum(metric(gateway, "turnkeep_gateway_turns_total", status="200")) == before + 10
        assert metric(gateway, "turnkeep_gateway_workers", state="ready") == [2]
    served = metric(gateway, "process_resident_memory_bytes")
    assert len(served) == PROCESSES


def test_what_one_process_is_told_all_do_also_one_that_was_started_again(gateway):
    status, _, raw = ask(gateway, "POST", "/workers/replica-1/drain")
    assert (status, json.loads(raw)["draining"]) == (200, True)

    def draining():
        data = json.loads(ask(gateway, "GET", "/workers")[2])["data"]
        return {worker["name"]: worker["draining"] for worker in data} == {"replica-0": False, "replica-1": True}

    wait_for(lambda: all(draining() for _ in range(12)))
    first = pids(gateway, "process")
    os.kill(first["process-1"], signal.SIGKILL)
    # Connections that the kernel had given to it break.
    with contextlib.suppress(ConnectionError):
        ask(gateway, "GET", "/health")
    # Until it is waited for: a process counts as dead while threads of it still hold its socket.
    wait_for(lambda: not os.path.exists(f"/proc/{first['process-1']}"))
    # The others serve meanwhile, and it does not take a turn before it knows who can have it.
    number = 0
    while number < 20 or pids(gateway, "process")["process-1"] == first["process-1"]:
        assert chat(gateway, [{"role": "user", "content": f"question {number}"}])[1]["X-Turnkeep-Replica"] == "replica-0"
        number += 1
    for number in range(20):
        assert chat(gateway, [{"role": "user", "content": f"question {number}"}])[1]["X-Turnkeep-Replica"] == "replica-0"
    assert {name for name, pid in pids(gateway, "process").items() if pid != first[name]} == {"process-1"}
    wait_for(lambda: len(metric(gateway, "process_resident_memory_bytes")) == PROCESSES)
    wait_for(lambda: all(draining() for _ in range(12)))
    assert ask(gateway, "DELETE", "/workers/replica-1/drain")[0] == 200
    wait_for(lambda: not any(draining() for _ in range(12)))
    replicas = {chat(gateway, [{"role": "user", "content": f"again {n}"}])[1]["X-Turnkeep-Replica"] for n in range(20)}
    assert replicas == {"replica-0", "replica-1"}


def test_a_replica_that_was_started_again_is_known_to_all(gateway):
    first = pids(gateway, "replica")["replica-0"]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: pids(gateway, "replica")["replica-0"] != first)

    def ready():
        data = json.loads(ask(gateway, "GET", "/workers")[2])["data"]
        return sorted(worker["name"] for worker in data if worker["state"] == "ready") == ["replica-0", "replica-1"]

    wait_for(lambda: all(ready() for _ in range(12)))


def test_a_port_that_is_shared_is_still_one_gateways_port(gateway):
    port = gateway.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "cli.main", "serve", "--simulate", "--port", port, "--processes", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert f"Port {port} on 127.0.0.1 is in use" in ended.stderr


def test_the_end_is_in_order_and_leaves_nothing_behind(gateway):
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(gateway.url).netloc, timeout=60)
    body = {"messages": [{"role": "user", "content": "long"}], "max_tokens": 150, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    everybody = [*pids(gateway, "process").values(), *pids(gateway, "replica").values()]
    assert all(map(alive, everybody))
    gateway.process.send_signal(signal.SIGTERM)
    rest = answer.read()
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert b'"finish_reason":"length"' in rest
    assert gateway.process.wait(60) == 0
    assert not any(map(alive, everybody))


def test_a_parent_that_is_killed_takes_all_with_it():
    with serve("--simulate", "--num-blocks", 100, "--processes", 2) as gateway:
        everybody = [*pids(gateway, "process").values(), *pids(gateway, "replica").values()]
        assert len(everybody) == 3
        gateway.process.kill()
        gateway.process.wait(30)
        wait_for(lambda: not any(map(alive, everybody)))
