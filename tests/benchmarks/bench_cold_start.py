"""From launching a process to the first token of a request that is sent as soon as it is ready.

    python tests/benchmarks/bench_cold_start.py [--model NAME|DIR] [--repeats 3] [--only engine|serve-1|serve-2]

Three ways of starting: `turnkeep engine`, and `turnkeep serve` with one and with two replicas. The first start finds the model
on the disk and nothing else in the cache (no built kernels, no digests, no measurements); the second finds what the first left.
Medians over fresh caches. The parts are the replica's own (docs/worker-protocol.md); with two replicas, of the slower one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoints import DEFAULT_MODEL, default_cache_dir, obtain

PARTS = re.compile(r"started in [\d.]+ s: load ([\d.]+) s, compile ([\d.]+) s, warm-up ([\d.]+) s")
TIMEOUT = 300.0
PROMPT = list(range(1000, 1032))


@dataclass(frozen=True)
class Start:
    """Seconds: the replica's parts, and from launch to `ready` and to the first token."""

    load: float
    compile: float
    warm_up: float
    ready: float
    first_token: float


@contextmanager
def launched(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT)
        if process.stdout is not None:
            process.stdout.close()


def start_engine(model: Path, cache: Path, log: Path) -> Start:
    began = time.monotonic()
    command = [sys.executable, "-m", "cli.main", "engine", "--model", str(model), "--cache-dir", str(cache), "--port", "0"]
    with launched(command, log) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the replica did not start:\n{log.read_text()}")
        ready = time.monotonic() - began
        address = json.loads(line)["address"].removeprefix("http://")
        body = {"request_id": "first", "token_ids": PROMPT, "sampling": {"max_tokens": 1}}
        first = stream_until(address, "/v1/generate", body, lambda text: b'"tokens"' in text) - began
    return Start(*parts_in(log), ready, first)


def start_serve(replicas: int, model: Path, cache: Path, log: Path) -> Start:
    began = time.monotonic()
    port = free_port()
    command = [sys.executable, "-m", "cli.main", "serve", "--replicas", str(replicas), "--model", str(model)]
    with launched([*command, "--cache-dir", str(cache), "--port", str(port)], log) as process:
        address = f"127.0.0.1:{port}"
        while not is_ready(address):
            if process.poll() is not None or time.monotonic() - began > TIMEOUT:
                raise SystemExit(f"the gateway did not start:\n{log.read_text()}")
            time.sleep(0.02)
        ready = time.monotonic() - began
        body = {
            "model": model.name,
            "messages": [{"role": "user", "content": "Name a colour."}],
            "stream": True,
            "max_tokens": 4,
        }
        first = stream_until(address, "/v1/chat/completions", body, lambda text: has_content(text)) - began
        while is_loading(log, replicas):  # the replicas that were not needed for the first answer
            time.sleep(0.05)
    return Start(*parts_in(log), ready, first)


def has_content(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:])["choices"]
    return bool(choices) and bool(choices[0]["delta"].get("content"))


def is_loading(log: Path, replicas: int) -> bool:
    return len(PARTS.findall(log.read_text())) < replicas


def parts_in(log: Path) -> tuple[float, float, float]:
    """The parts that the log says, of the replica that took longest."""
    found = [(float(load), float(build), float(warm)) for load, build, warm in PARTS.findall(log.read_text())]
    return max(found, key=sum)


def is_ready(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def stream_until(address: str, path: str, body: dict[str, object], wanted: Callable[[bytes], bool]) -> float:
    """Sends a request; when the first line that is `wanted` came, on the monotonic clock."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{path} answered {response.status}: {response.read().decode()}")
    try:
        while line := response.readline():
            if wanted(line):
                return time.monotonic()
    finally:
        connection.close()
    raise SystemExit(f"{path} ended without a token")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def medians(starts: list[Start]) -> list[float]:
    names = ("load", "compile", "warm_up", "ready", "first_token")
    return [statistics.median(getattr(start, name) for start in starts) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["engine", "serve-1", "serve-2"], default=None)
    options = parser.parse_args()
    model = obtain(options.model, default_cache_dir())
    ways: dict[str, Callable[[Path, Path], Start]] = {
        "engine": lambda cache, log: start_engine(model, cache, log),
        "serve-1": lambda cache, log: start_serve(1, model, cache, log),
        "serve-2": lambda cache, log: start_serve(2, model, cache, log),
    }
    print(f"{model.name} on {len(os.sched_getaffinity(0))} cores, medians of {options.repeats}, seconds", flush=True)
    print(f"{'':16}{'load':>8}{'compile':>9}{'warm-up':>9}{'ready':>8}{'first token':>13}", flush=True)
    for name, way in ways.items():
        if options.only not in (None, name):
            continue
        firsts, seconds = [], []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as directory:
                cache, log = Path(directory) / "cache", Path(directory) / "log"
                firsts.append(way(cache, log))
                time.sleep(2.1)  # digests of files that changed a moment ago are not kept
                seconds.append(way(cache, log))
        for which, starts in (("first", firsts), ("second", seconds)):
            load, build, warm, ready, token = medians(starts)
            print(f"{name + ', ' + which:16}{load:8.2f}{build:9.2f}{warm:9.2f}{ready:8.2f}{token:13.2f}", flush=True)


if __name__ == "__main__":
    main()
