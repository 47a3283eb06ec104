"""Milliseconds between two forward passes of a decode: scheduling, batch building, sampling, stops, chunks, delivery.

    python tests/benchmarks/bench_step_overhead.py [--rows 1 16] [--forward stub|real] [--megabytes 270] [--steps 300]
                                                   [--only TEXT] [--levels step thread http] [--profile]

Three levels: `step`, the engine alone, stepped in a loop; `thread`, on its thread with an event loop that reads the streams;
`http`, a replica's server and a client process that reads 16 streams over a socket. A gap is from the end of one forward pass
to the beginning of the next; `forward` is how long a pass takes at that level: what the server takes from it by using the
same cores shows there.

stub: not a model. It reads `--megabytes` of memory on all threads in one torch call, without the GIL (what a decode step of
that many megabytes of weights cannot avoid), and gives random logits. real: SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from tokenizers import Tokenizer

from engine.checkpoints import DEFAULT_MODEL, default_cache_dir, obtain
from engine.config import EngineConfig
from engine.forward import Forward
from engine.kernels.interface import StepBatch
from engine.loading import load_engine
from engine.server.app import ReplicaApp
from engine.server.config import ServerConfig
from engine.thread import EngineThread
from gateway.workers.protocol import GenerateRequest, SamplingParams

GRAMMAR = {
    "type": "structural_tag",
    "format": {
        "type": "json_schema",
        "json_schema": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "numbers": {"type": "array", "items": {"type": "integer"}}},
            "required": ["text", "numbers"],
            "additionalProperties": False,
        },
    },
}
CASES: dict[str, tuple[SamplingParams, str | None]] = {
    "greedy": (SamplingParams(temperature=0.0), None),
    "greedy, stop string": (SamplingParams(temperature=0.0, stop=("\n\nnever\n",)), None),
    "temperature": (SamplingParams(temperature=0.8), None),
    "top_p 0.95": (SamplingParams(temperature=0.8, top_p=0.95), None),
    "top_k 50, logprobs": (SamplingParams(temperature=0.8, top_k=50, logprobs=5), None),
    "greedy, grammar": (SamplingParams(temperature=0.0), json.dumps(GRAMMAR)),
}
PROMPT = 200


class Timed:
    """A forward pass that notes when it ran: (began, ended, rows) each."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.calls: list[tuple[float, float, int]] = []

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        began = time.perf_counter()
        logits = self._forward.run(batch, kv, rows)
        self.calls.append((began, time.perf_counter(), batch.num_tokens))
        return logits

    def decode(self, rows: int) -> tuple[float, float]:
        """Medians in ms over steps of `rows` tokens: gap before the pass, and the pass."""
        pairs = [(b[0] - a[1], b[1] - b[0]) for a, b in zip(self.calls, self.calls[1:], strict=False) if a[2] == b[2] == rows]
        if len(pairs) < 20:
            raise SystemExit(f"only {len(pairs)} decode steps of {rows} rows were seen")
        return statistics.median(gap for gap, _ in pairs) * 1e3, statistics.median(took for _, took in pairs) * 1e3


class Stub:
    """Reads memory and gives logits that fall off as a language model's do (rank to the power of -1.2). `unlikely`: tokens that
    would end a generation, or the string that a grammar is in."""

    def __init__(self, vocab_size: int, megabytes: float, unlikely: Sequence[int]) -> None:
        self._weights = torch.zeros(int(megabytes * 1e6 / 4))
        ranked = -1.2 * torch.log(torch.arange(1, vocab_size + 1, dtype=torch.float32))
        self._logits = torch.stack([ranked[torch.randperm(vocab_size)] for _ in range(64)])
        self._logits[:, list(unlikely)] = -30.0
        self._step = 0

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        self._weights.sum()
        self._step += 1
        return self._logits[(torch.arange(len(rows)) + self._step) % 64]


class Harness:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        config = EngineConfig(
            model=obtain(DEFAULT_MODEL, default_cache_dir()), num_blocks=4096, max_num_seqs=64, max_draft_tokens=0
        )
        self.engine = load_engine(config)
        inner = self.engine._runner._forward
        if options.forward == "stub":
            tokens = Tokenizer.from_file(str(config.model / "tokenizer.json")).get_vocab().items()
            unlikely = [token_id for token, token_id in tokens if '"' in token or token_id < 17]
            inner = Stub(self.engine.info.vocab_size, options.megabytes, unlikely)
        self.forward = Timed(inner)
        self.engine._runner._forward = self.forward
        self._rng = np.random.default_rng(1)
        self._ids = 0

    def requests(self, rows: int, case: str) -> list[GenerateRequest]:
        sampling, grammar = CASES[case]
        made = []
        for _ in range(rows):
            self._ids += 1
            prompt = self._rng.integers(100, 40000, PROMPT).tolist()
            params = replace_struct(sampling, max_tokens=self._options.steps, ignore_eos=True, seed=self._ids)
            made.append(GenerateRequest(request_id=f"r{self._ids}", token_ids=prompt, sampling=params, grammar=grammar))
        return made

    def step(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self.engine.add(self.engine.prepare(request))
        while self.engine.has_work():
            self.engine.step()
            self.engine.stats()
            self.engine.take_events()

    async def thread(self, requests: list[GenerateRequest]) -> None:
        thread = EngineThread(self.engine)
        await thread.start()

        async def read(request: GenerateRequest) -> None:
            stream = await thread.submit(request)
            while await stream.read():
                pass

        await asyncio.gather(*map(read, requests))
        await thread.close()

    async def http(self, requests: list[GenerateRequest]) -> None:
        from aiohttp import web

        thread = EngineThread(self.engine)
        await thread.start()
        replica = ReplicaApp(ServerConfig())
        runner = web.AppRunner(replica.app, access_log=None)
        await runner.setup()
        with tempfile.TemporaryDirectory() as directory:
            path = str(Path(directory) / "socket")
            await web.UnixSite(runner, path).start()
            replica.attach(thread)
            client = multiprocessing.get_context("spawn").Process(target=client_process, args=(path, requests))
            client.start()
            await asyncio.to_thread(client.join)
            if client.exitcode:
                raise SystemExit("the client failed")
            await thread.close()
            await runner.cleanup()

    def gaps(self, level: str, rows: int, case: str) -> tuple[float, float]:
        self.forward.calls.clear()
        requests = self.requests(rows, case)
        if level == "step":
            self.step(requests)
        else:
            asyncio.run(self.thread(requests) if level == "thread" else self.http(requests))
        return self.forward.decode(rows)


def replace_struct(params: SamplingParams, **changes: Any) -> SamplingParams:
    import msgspec

    return msgspec.structs.replace(params, **changes)


def client_process(path: str, requests: list[GenerateRequest]) -> None:
    import msgspec

    async def read(session: aiohttp.ClientSession, request: GenerateRequest) -> None:
        async with session.post(
            "http://replica/v1/generate", data=msgspec.json.encode(request), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 200, await response.text()
            async for _ in response.content:
                pass

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path, limit=0)) as session:
            await asyncio.gather(*(read(session, request) for request in requests))

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--forward", choices=["stub", "real"], default="stub")
    parser.add_argument("--megabytes", type=float, default=270.0, help="of memory that the stub reads")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--levels", nargs="+", choices=["step", "thread", "http"], default=["step", "thread", "http"])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--profile", action="store_true", help="of the engine alone")
    options = parser.parse_args()
    harness = Harness(options)
    if options.profile:
        requests = harness.requests(options.rows[-1], next(case for case in CASES if options.only in case))
        with cProfile.Profile() as profile:
            harness.step(requests)
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    print(f"{options.forward} forward pass, {torch.get_num_threads()} threads; ms, medians: gap (forward)")
    print(f"{'':22}{'rows':>5}" + "".join(f"{level:>17}" for level in options.levels))
    for case in CASES:
        if options.only not in case:
            continue
        for rows in options.rows:
            cells = [harness.gaps(level, rows, case) for level in options.levels]
            print(f"{case:22}{rows:5}" + "".join(f"{gap:8.3f} ({took:6.2f})" for gap, took in cells), flush=True)


if __name__ == "__main__":
    main()
