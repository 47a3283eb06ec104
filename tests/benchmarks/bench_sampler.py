"""Microseconds per row of sampling on this CPU: torch with a sort of the vocabulary, the engine in NumPy, the engine in C++.

    python tests/benchmarks/bench_sampler.py [--vocab 49152 151936] [--rows 1 16 64] [--threads 2]

All in the same run and on the same threads (NumPy has one). The sort is what one would write with torch: sort, softmax, cumsum,
mask, multinomial; greedy is argmax and temperature alone needs no sort.

Two kinds of logits: `model`, whose probabilities fall off as a language model's do (rank to the power of -1.2), and `flat`,
normal variates, where nearly the whole vocabulary is in the nucleus: the worst case of top_p.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from engine.checkpoints import default_cache_dir
from engine.kernels.cpu.kernel import CpuAttention
from engine.kernels.cpu.sampling import CpuSampler
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "grammar": SamplingParams(temperature=0.0),
    "logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
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


@torch.inference_mode()
def by_sorting(logits, params):
    """The usual way, without penalties and log-probabilities: all rows have the same parameters."""
    if params.temperature == 0.0:
        return torch.argmax(logits, dim=-1)
    scores = logits / params.temperature
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return torch.multinomial(torch.softmax(scores, dim=-1), 1)
    ordered, ids = torch.sort(scores, dim=-1, descending=True)
    if params.top_k:
        ordered[:, params.top_k :] = -torch.inf
    probabilities = torch.softmax(ordered, dim=-1)
    if params.min_p:
        probabilities[probabilities < params.min_p * probabilities[:, :1]] = 0.0
    if params.top_p < 1.0:
        probabilities[torch.cumsum(probabilities, dim=-1) - probabilities >= params.top_p] = 0.0
    return ids.gather(1, torch.multinomial(probabilities, 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where built kernels are kept")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernel = CpuAttention.build(64, options.threads, options.cache_dir / "kernels")
    chooser, prompt = CpuSampler(kernel.library, kernel.team), np.arange(2000, dtype=np.uint32)
    print(f"{options.threads} thread(s), microseconds per row, the fastest of {options.repeats}")
    print(f"{'logits':7}{'V':>7}{'R':>4}  {'case':20}{'sorting':>9}{'NumPy':>9}{'C++':>9}")
    for vocab in options.vocab:
        samplers = [Sampler(vocab), Sampler(vocab, "cpu", chooser)]
        for kind in ("model", "flat"):
            for rows in options.rows:
                logits = logits_of(kind, rows, vocab)
                ones = torch.full((rows, (vocab + 31) // 32), -1, dtype=torch.int32)
                for name, params in CASES.items():
                    states = [SamplingState(params, prompt, seed, 0, (2,)) for seed in range(rows)]
                    for state in states:
                        for token_id in range(200):
                            state.append(token_id)
                    mask = ones if name in ("all on", "grammar") else None
                    calls = [lambda p=params, x=logits: by_sorting(x, p)]
                    calls += [lambda s=states, m=mask, x=logits, by=by: by.sample(x, s, m) for by in samplers]
                    cells = [microseconds(call, options.repeats) / rows for call in calls]
                    print(f"{kind:7}{vocab:7}{rows:4}  {name:20}" + "".join(f"{cell:9.1f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
