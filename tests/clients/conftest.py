"""Gateways in processes of their own, as `turnkeep serve` starts them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest


@dataclass
class Served:
    url: str
    process: subprocess.Popen
    lines: list

    @property
    def api(self):
        return self.url + "/v1"

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serve(*arguments, env=None):
    """`turnkeep serve` with these arguments on a free port, ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "serve", "--port", "0", *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(env or {})},
    )
    lines, found, ready = [], [], threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            match = re.search(r"is ready at (http\S+)/v1", line)
            if match:
                found.append(match[1])
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(120), "".join(lines)
        assert found, "".join(lines)
        yield Served(found[0], process, lines)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        reader.join(10)
        process.stderr.close()


@pytest.fixture(scope="session")
def start_gateway():
    return serve


@pytest.fixture(scope="session")
def simulated(smollm2_dir, tmp_path_factory):
    """Two replicas without a model behind keys, recording."""
    record = tmp_path_factory.mktemp("recorded")
    options = ("--model", smollm2_dir, "--served-model-name", "smollm2", "--served-model-name", "gpt-4o", "--record", record)
    with serve("--simulate", "--replicas", 2, "--engine", "sim-time-scale=0", "--api-key", "sk-test", *options) as served:
        served.record = record
        yield served


@pytest.fixture(scope="session")
def tiny(tiny_checkpoint):
    """A real engine with a tiny random model: nonsense as text, and whatever the grammar demands."""
    directory = tiny_checkpoint("llama", max_position_embeddings=4096)
    with serve("--model", directory, "--served-model-name", "tiny", "--num-blocks", 1024, "--dtype", "float32") as served:
        yield served
