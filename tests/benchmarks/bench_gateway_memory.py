"""Resident memory of the gateway over many turns.

    python tests/benchmarks/bench_gateway_memory.py [--turns 10000] [--concurrency 16] [--json]

Starts `turnkeep serve --simulate` with two replicas and sends it sessions of ten turns, each session with a name and a text
of its own, streamed and not, some of them left in the middle. What must stay flat is everything that is remembered: sessions,
homes, the residency index (its replicas' caches are small, so blocks come and go), metrics, connections. Prints the resident
set every tenth of the turns, and the slope over the second half, by least squares.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time

import aiohttp
import numpy as np
import psutil

from cli.gateway_process import GatewayProcess, serve_command

TURNS_PER_SESSION = 10
LEAVE_EVERY = 25
WORDS = ["the", "tool", "returns", "name", "file", "answer", "path", "read", "list", "value", "error", "result", "with"]


class Load:
    """Sessions that follow one another until enough turns were sent."""

    def __init__(self, url: str, turns: int) -> None:
        self.url = url
        self.turns = turns
        self.sent = 0
        self.ended = 0
        self.left = 0
        self.failed = 0
        self.sessions = 0

    async def run(self, client: aiohttp.ClientSession, concurrency: int) -> None:
        await asyncio.gather(*(self._client(client) for _ in range(concurrency)))

    async def _client(self, client: aiohttp.ClientSession) -> None:
        while self.sent < self.turns:
            self.sessions += 1
            rng = random.Random(self.sessions)
            name = f"session-{self.sessions}-{rng.randrange(10**9)}"
            messages = [{"role": "system", "content": "You are a helpful agent. " * 8}]
            for _ in range(TURNS_PER_SESSION):
                if self.sent >= self.turns:
                    return
                self.sent += 1
                messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=60))})
                text = await self._turn(client, name, messages, rng)
                messages.append({"role": "assistant", "content": text or "nothing"})

    async def _turn(
        self, client: aiohttp.ClientSession, session: str, messages: list[dict[str, str]], rng: random.Random
    ) -> str:
        stream = rng.random() < 0.5
        leave = self.sent % LEAVE_EVERY == 0
        body = {"messages": messages, "max_tokens": 400 if leave else 8, "stream": stream}
        try:
            async with asyncio.timeout(0.01 if leave else 60):
                async with client.post(
                    f"{self.url}/v1/chat/completions", json=body, headers={"X-Session-ID": session}
                ) as response:
                    text = await response.text()
        except TimeoutError:
            self.left += 1
            return ""
        self.ended += 1
        if response.status != 200:
            self.failed += 1
            return ""
        return "" if stream else json.loads(text)["choices"][0]["message"]["content"]


async def measure(turns: int, concurrency: int) -> dict[str, object]:
    options = ("--simulate", "--replicas", "2", "--num-blocks", "2048", "--log-level", "warning")
    command = serve_command(*options, "--engine", "sim-time-scale=0.02")
    async with GatewayProcess(command) as gateway, aiohttp.ClientSession() as client:
        process = gateway_process()
        load = Load(gateway.url, turns)
        points: list[tuple[int, float]] = []

        def look() -> None:
            points.append((load.sent, process.memory_info().rss / 2**20))
            print(f"{points[-1][0]:>8} turns {points[-1][1]:>8.1f} MiB", file=sys.stderr, flush=True)

        began = time.monotonic()
        look()
        running = asyncio.ensure_future(load.run(client, concurrency))
        step = max(turns // 10, 1)
        while not running.done():
            await asyncio.wait({running}, timeout=0.05)
            if load.sent >= points[-1][0] + step:
                look()
        await running
        seconds = time.monotonic() - began
        look()
        second_half = [(sent, rss) for sent, rss in points if sent >= turns / 2]
        slope = float(np.polyfit(*zip(*second_half, strict=True), deg=1)[0]) if len(second_half) > 2 else float("nan")
        async with client.get(f"{gateway.url}/metrics") as response:
            metrics = await response.text()
    return {
        "turns": load.sent,
        "sessions": load.sessions,
        "ended": load.ended,
        "left": load.left,
        "failed": load.failed,
        "turns_per_second": round(load.sent / seconds, 1),
        "rss_mib": [(sent, round(rss, 1)) for sent, rss in points],
        "slope_kib_per_1000_turns": round(slope * 1024 * 1000, 1),
        "indexed_blocks": sum(
            float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("turnkeep_gateway_index_blocks{")
        ),
        "metrics_lines": len(metrics.splitlines()),
    }


def gateway_process() -> psutil.Process:
    """The `turnkeep serve` that is our child."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "serve" in child.cmdline():
                return child
    raise SystemExit("turnkeep serve is not running")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.turns, arguments.concurrency))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        if name != "rss_mib":
            print(f"{name:>26}: {value}")


if __name__ == "__main__":
    main()
