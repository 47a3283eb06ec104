"""How long a request lives on after its client has left, by its replica's own books.

    python tests/benchmarks/bench_disconnect.py [--rounds 40] [--real] [--json]

Starts one replica (simulated; `--real`: the default model) and `turnkeep serve` in front of it. A client sends a request,
streamed or not, and drops its connection while the prompt is prefilled or while tokens are decoded. Timed is from there until
the replica counts the request as aborted and its blocks as free, which is asked of the replica every millisecond, past the
gateway. A replica drops requests between two steps, so the rest of a step of the real model counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from cli.gateway_process import GatewayProcess, serve_command
from engine.checkpoints import DEFAULT_MODEL, default_cache_dir, obtain
from gateway.workers.protocol import WorkerStats

SIMULATED = ("--simulate", "--sim-step", "0.006", "--sim-prefill-token", "2e-4", "--max-model-len", "16000")
GOAL = 0.050


class Books:
    """A replica's statistics, asked of itself."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def now(self) -> WorkerStats:
        async with self._session.get("http://replica/v1/stats") as response:
            return msgspec.json.decode(await response.read(), type=WorkerStats)

    async def idle(self) -> WorkerStats:
        while (stats := await self.now()).running or stats.waiting:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.001)
        return stats


def body(prompt_words: int, number: int, *, stream: bool) -> dict[str, Any]:
    text = " ".join(f"word{number}x{place}" for place in range(prompt_words))
    message = {"role": "user", "content": text}
    return {"messages": [message], "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": stream}


async def leave(url: str, books: Books, request: dict[str, Any], *, decoding: bool) -> tuple[float, int]:
    """Seconds from leaving until the books are empty, and tokens that were generated after it."""
    before = await books.idle()
    async with aiohttp.ClientSession() as client:
        asking = asyncio.ensure_future(client.post(url + "/v1/chat/completions", json=request))
        while True:
            stats = await books.now()
            generated = stats.generated_tokens_total - before.generated_tokens_total
            if generated >= 5 if decoding else stats.running:
                break
            await asyncio.sleep(0.001)
        if not decoding:
            await asyncio.sleep(0.02)
        at_leaving = (await books.now()).generated_tokens_total
        if asking.done():
            (await asking).close()
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        began = time.perf_counter()
    after = await books.idle()
    seconds = time.perf_counter() - began
    if after.aborted_total != before.aborted_total + 1 or after.free_blocks + after.cached_blocks != after.num_blocks:
        raise RuntimeError(f"the request was not aborted, or blocks are missing: {before} {after}")
    return seconds, after.generated_tokens_total - at_leaving


async def measure(rounds: int, *, real: bool) -> list[dict[str, Any]]:
    model = obtain(DEFAULT_MODEL, default_cache_dir())
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "replica.sock"
        arguments = ("--model", str(model), "--uds", str(socket), *(() if real else SIMULATED))
        replica = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cli.main", "engine", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert replica.stdout is not None
            await replica.stdout.readline()
            serving = GatewayProcess(serve_command("--model", str(model), "--worker", f"unix:{socket}"))
            connector = aiohttp.UnixConnector(str(socket))
            async with serving as gateway, aiohttp.ClientSession(connector=connector) as session:
                books = Books(session)
                for decoding in (False, True):
                    for stream in (True, False):
                        words = (900 if real else 1500) if not decoding else 20
                        times, wasted = [], []
                        for number in range(rounds):
                            request = body(words, number + 1000 * len(rows), stream=stream)
                            seconds, tokens = await leave(gateway.url, books, request, decoding=decoding)
                            times.append(seconds)
                            wasted.append(tokens)
                        rows.append(
                            {
                                "phase": "decode" if decoding else "prefill",
                                "stream": stream,
                                "p50": statistics.median(times),
                                "p95": sorted(times)[int(0.95 * (len(times) - 1))],
                                "max": max(times),
                                "tokens_after": statistics.mean(wasted),
                            }
                        )
        finally:
            replica.terminate()
            await replica.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(measure(options.rounds, real=options.real))
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'phase':8} {'':10} {'p50':>9} {'p95':>9} {'max':>9}   tokens generated after it left (mean)")
    for row in rows:
        kind = "streamed" if row["stream"] else "whole"
        times = " ".join(f"{1000 * row[name]:6.1f} ms" for name in ("p50", "p95", "max"))
        print(f"{row['phase']:8} {kind:10} {times}   {row['tokens_after']:.1f}")
    worst = max(row["p95"] for row in rows)
    print(f"p95 of the worst: {1000 * worst:.1f} ms; the goal is {1000 * GOAL:.0f} ms")


if __name__ == "__main__":
    main()
