"""Microseconds per row of sampling on this CPU, beside torch.multinomial of ready-made probabilities in the same run.

    python tests/benchmarks/bench_sampler.py [--vocab 49152] [--rows 1 16] [--threads 1]

Two kinds of logits: `model`, whose probabilities fall off as a language model's do (rank to the power of -1.2), and `flat`,
normal variates, where nearly the whole vocabulary is in the nucleus: the worst case of top_p.
"""

import argparse
import time

import numpy as np
import torch

from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(top_k=50),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "all on": SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={5: 1.0},
        min_tokens=10_000,
        logprobs=5,
    ),
}


def microseconds(call, repeats):
    """The fastest of single calls: other processes only ever add to it."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e6


def logits_of(kind, rows, vocab):
    generator = torch.Generator().manual_seed(1)
    if kind == "flat":
        return torch.randn(rows, vocab, generator=generator)
    ranked = -1.2 * torch.log(torch.arange(1, vocab + 1, dtype=torch.float32))
    return torch.stack([ranked[torch.randperm(vocab, generator=generator)] for _ in range(rows)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sampler, prompt = Sampler(options.vocab), np.arange(2000, dtype=np.uint32)
    ones = {rows: torch.full((rows, (options.vocab + 31) // 32), -1, dtype=torch.int32) for rows in options.rows}
    print(f"V = {options.vocab}, {options.threads} thread(s), microseconds per row (ratio to torch.multinomial)")
    for kind in ("model", "flat"):
        for rows in options.rows:
            logits = logits_of(kind, rows, options.vocab)
            probabilities = torch.softmax(logits, dim=-1)
            multinomial = microseconds(lambda p=probabilities: torch.multinomial(p, 1), options.repeats) / rows
            print(f"{kind:6} R = {rows:<3} {'torch.multinomial':20} {multinomial:9.1f}")
            for name, params in CASES.items():
                states = [SamplingState(params, prompt, seed, 0, (2,)) for seed in range(rows)]
                for state in states:
                    for token_id in range(200):
                        state.append(token_id)
                mask = ones[rows] if name == "all on" else None
                taken = microseconds(lambda s=states, m=mask, x=logits: sampler.sample(x, s, m), options.repeats) / rows
                print(f"{kind:6} R = {rows:<3} {name:20} {taken:9.1f}  ({taken / multinomial:.2f})")


if __name__ == "__main__":
    main()
