"""Decode and prefill of the engine beside `transformers` generate: same machine, same run, same weights, threads and lengths.

    python tests/benchmarks/bench_vs_transformers.py [--model DIR] [--dtype bfloat16 float32] [--only TEXT]
                                                     [--repeats 5] [--threads N]

The two take turns, and the medians are compared. Decode is the time of a generation less that of its first token. The prefix
cache is off.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.checkpoints import DEFAULT_MODEL, default_cache_dir, obtain
from engine.config import EngineConfig
from engine.loading import load_engine
from gateway.workers.protocol import GenerateRequest, SamplingParams

DECODED = 48
SHORT_PROMPT = 16


class Ours:
    def __init__(self, model: Path, dtype: str) -> None:
        self.engine = load_engine(EngineConfig(model=model, dtype=dtype, num_blocks=1024, prefix_caching=False))
        self.vocab_size = self.engine.info.vocab_size

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            request = GenerateRequest(request_id=str(index), token_ids=prompt, sampling=sampling)
            self.engine.add(self.engine.prepare(request))
        while self.engine.has_work():
            self.engine.step()
        return time.perf_counter() - began


class Theirs:
    def __init__(self, model: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
        )
        return time.perf_counter() - began


def decode_rate(engine: Ours | Theirs, prompts: list[list[int]]) -> float:
    """Tokens a second of all sequences together, without their first."""
    first = engine.seconds(prompts, 1)
    return len(prompts) * DECODED / (engine.seconds(prompts, DECODED + 1) - first)


def prefill_rate(engine: Ours | Theirs, prompts: list[list[int]]) -> float:
    """Prompt tokens a second."""
    return sum(map(len, prompts)) / engine.seconds(prompts, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--only", default="", help="run the works whose name holds this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = options.model or obtain(DEFAULT_MODEL, default_cache_dir())
    table = Table(title=f"{model.name}, {torch.get_num_threads()} threads, medians of {options.repeats} pairs, tokens/s")
    for column in ("dtype", "work", "engine", "transformers", "ratio"):
        table.add_column(column, justify="left" if column in ("dtype", "work") else "right")
    for dtype in options.dtype:
        ours, theirs = Ours(model, dtype), Theirs(model, dtype)
        generator = torch.Generator().manual_seed(0)
        works = [
            ("decode, batch 1", decode_rate, 1, SHORT_PROMPT),
            ("decode, batch 4", decode_rate, 4, SHORT_PROMPT),
            ("decode, batch 1 at 2000", decode_rate, 1, 2000),
            ("prefill 512", prefill_rate, 1, 512),
            ("prefill 2000", prefill_rate, 1, 2000),
        ]
        for name, rate, sequences, length in works:
            if options.only not in name:
                continue
            prompts = torch.randint(10, ours.vocab_size, (sequences, length), generator=generator).tolist()
            pairs = []
            for repeat in range(options.repeats + 1):
                pair = (rate(ours, prompts), rate(theirs, prompts))
                if repeat:  # the first warms up
                    pairs.append(pair)
            mine = statistics.median(first for first, _ in pairs)
            other = statistics.median(second for _, second in pairs)
            ratio = statistics.median(first / second for first, second in pairs)
            table.add_row(dtype, name, f"{mine:.0f}", f"{other:.0f}", f"{ratio:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
