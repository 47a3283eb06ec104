"""`turnkeep engine` as a process: what it prints, when it ends, and with which code and sentence."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from gateway.workers.protocol import WorkerInfo

CHECKS = ("--debug-integrity", "--log-level", "info")


def command(*arguments):
    return [sys.executable, "-m", "cli.main", "engine", *map(str, arguments)]


class Process:
    """A replica that has been started; its log is read as it comes, so that it never blocks on it."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        self.log = []
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        assert line, self.finish()
        self.ready = json.loads(line)

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def finish(self, timeout=30):
        """The exit code and the log. Nothing but the one line may have come on standard output."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        assert self.process.stdout.read() == ""
        return code, "".join(self.log)

    def connection(self):
        address = self.ready["address"]
        if address.startswith("http"):
            return http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
        connection = http.client.HTTPConnection("replica", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(address.removeprefix("unix:"))
        return connection

    def get(self, path):
        with contextlib.closing(self.connection()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def start_stream(self, request_id="r", max_tokens=8, prompt=range(10, 50)):
        """The response of an accepted request, not read yet."""
        sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body = json.dumps({"request_id": request_id, "token_ids": list(prompt), "sampling": sampling})
        connection = self.connection()
        connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def generate(self, **changes):
        return [json.loads(line) for line in self.start_stream(**changes).read().splitlines()]


@contextlib.contextmanager
def process(*arguments):
    started = Process(*arguments)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait()
        started._reader.join(10)
        started.process.stdout.close()
        started.process.stderr.close()


def failed(*arguments, code=1):
    """The sentence of a replica that does not start."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert last.endswith(".")
    return last


def tokens_of(chunks):
    return [token for chunk in chunks if chunk["type"] == "tokens" for token in chunk["token_ids"]]


def test_a_signal_ends_it_after_its_streams():
    slow = ("--sim-time-scale", 1, "--sim-step", 0.01)
    with process("--simulate", "--port", 0, *slow, *CHECKS) as replica:
        assert replica.ready["event"] == "ready"
        assert replica.ready["pid"] == replica.process.pid
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", replica.ready["address"])
        status, info = replica.get("/v1/info")
        assert status == 200
        assert json.loads(info)["instance"] == replica.ready["instance"]
        streams = [replica.start_stream(f"r{number}", 60, range(number, number + 30)) for number in range(4)]
        first = streams[0].readline()
        idle = replica.connection()
        idle.request("GET", "/health")
        assert idle.getresponse().read()
        events = replica.connection()
        events.request("GET", "/v1/kv_events")
        events = events.getresponse()
        replica.signal()
        while not any("shutting down: 4 requests" in line for line in replica.log):
            assert replica.process.poll() is None
            time.sleep(0.005)
        # A connection that was open is told; a new one finds nobody.
        idle.request("GET", "/health")
        answer = idle.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "shutting_down")
        with pytest.raises(ConnectionError):
            replica.get("/health")
        for stream in streams:
            rest = stream.read()
            chunks = [json.loads(line) for line in ((first if stream is streams[0] else b"") + rest).splitlines()]
            assert [chunk["type"] for chunk in chunks[-2:]] == ["finished", "done"]
            assert len(tokens_of(chunks)) == 60
        events.read()  # ends, whole
        code, log = replica.finish()
        assert code == 0, log
        assert "Traceback" not in log


@pytest.mark.parametrize("after", [2.0, 2.5, 3.0])
def test_a_signal_during_the_load_of_a_model_ends_it_in_order(smollm2_dir, tmp_path, after):
    """int4, since making its codes takes a second or two of torch on the loading thread."""
    address = tmp_path / "replica.sock"
    arguments = command("--model", smollm2_dir, "--quantization", "int4", "--num-blocks", 64, "--uds", address)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as replica:
        while not address.exists():
            assert replica.poll() is None, replica.communicate()
            time.sleep(0.01)
        time.sleep(after)
        replica.send_signal(signal.SIGTERM)
        _, log = replica.communicate(timeout=30)
    assert replica.returncode == 0, log
    assert "terminate called" not in log


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_streams_that_take_too_long_are_ended(how):
    grace = 0.3 if how == "timeout" else 60
    slow = ("--sim-step", 0.05, "--shutdown-timeout", grace)
    with process("--simulate", "--port", 0, *slow, *CHECKS) as replica:
        stream = replica.start_stream(max_tokens=3000)
        stream.readline()
        replica.signal(signal.SIGINT)
        if how == "second signal":
            while not any("shutting down" in line for line in replica.log):
                time.sleep(0.005)
            replica.signal()
        last = json.loads(stream.read().splitlines()[-1])
        assert (last["type"], last["code"]) == ("failed", "shutting_down")
        code, log = replica.finish()
        assert code == 0, log
        assert "Traceback" not in log


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = failed("--simulate", "--port", port)
    assert f"127.0.0.1:{port} is in use by another process; choose another port" in sentence


def test_unix_sockets_alive_stale_and_no_sockets(tmp_path):
    path = tmp_path / "replica.sock"
    with process("--simulate", "--uds", path, *CHECKS) as first:
        assert first.ready["address"] == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        assert f"{path} is in use by another process" in failed("--simulate", "--uds", path)
        assert tokens_of(first.generate())  # it was not disturbed
        # A process that dies leaves its socket behind; the next one takes the place.
        first.signal(signal.SIGKILL)
        first.process.wait(10)
        assert path.is_socket()
        with process("--simulate", "--uds", path, *CHECKS) as second:
            assert len(tokens_of(second.generate())) == 8
            second.signal()
            assert second.finish()[0] == 0
    assert not path.exists()
    path.write_text("somebody's notes")
    assert "exists and is not a socket" in failed("--simulate", "--uds", path)
    assert path.read_text() == "somebody's notes"
    assert "does not exist" in failed("--simulate", "--uds", tmp_path / "nowhere" / "replica.sock")
    assert "too long for a unix socket" in failed("--simulate", "--uds", tmp_path / ("x" * 120))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--simulate", "--host", "host.invalid"), 1, "is not an address of this machine"),
        (("--simulate", "--max-num-batched-tokens", 1), 1, "max_num_seqs"),
        (("--simulate", "--kv-memory", "1GiB"), 2, "--num-blocks"),
        (("--sim-seed", 1), 2, "--simulate"),
        (("--otlp", "collector:4318"), 2, "http://"),
        (("--max-body", "50%"), 2, "bytes"),
    ],
)
def test_settings_that_cannot_work(arguments, code, words):
    assert words in failed(*arguments, "--port", 0, code=code)


def test_a_model_that_is_missing_or_damaged(tiny_checkpoint, tmp_path):
    common = ("--port", 0, "--cache-dir", tmp_path / "cache")
    assert "no such directory" in failed("--model", tmp_path / "nowhere", *common)
    assert "device 'quantum' cannot be used here" in failed("--model", tiny_checkpoint("llama"), "--device", "quantum", *common)
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint("llama", max_shard_size="100KB"), damaged)
    shard = sorted(damaged.glob("model-*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1000)
    assert shard.name in failed("--model", damaged, *common)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_model_is_served(tiny_checkpoint, tmp_path, kernels):
    options = ("--dtype", "float32", "--num-blocks", 64, "--threads", 1, "--kernels", kernels, "--graph-batch-sizes", "1,2")
    with process("--model", tiny_checkpoint("llama"), "--port", 0, "--model-name", "tiny", *options, *CHECKS) as replica:
        info = json.loads(replica.get("/v1/info")[1])
        assert {"model": "tiny", "num_blocks": 64, "vocab_size": 320}.items() <= info.items()
        assert set(info) <= set(WorkerInfo.__struct_fields__)
        chunks = replica.generate(max_tokens=20)
        assert len(tokens_of(chunks)) == 20
        stream = replica.start_stream("long", max_tokens=200)
        stream.readline()
        replica.signal()
        rest = [json.loads(line) for line in stream.read().splitlines()]
        assert rest[-1]["type"] == "done"
        code, log = replica.finish()
        assert code == 0, log
        assert "Traceback" not in log
        chosen = [line for line in log.splitlines() if "C++" in line or "plain torch" in line]
        assert len(chosen) == (1 if kernels == "auto" else 0)  # auto says what it found
