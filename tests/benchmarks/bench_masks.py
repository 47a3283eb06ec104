"""What grammars take of a step: masks and advancing on the engine's thread, with masks made beside the pass and before it.

    python -m tests.benchmarks.bench_masks [--pairs 3] [--batch 1 --batch 16] [--tokens 96] [--draft 8] [--tools 50]

The embedded model writes calls under the grammar of a list of tools, on both sides in turn, on one engine each. A side's figure
is what the engine's thread spent on masks and matchers (allowed tokens, forced tokens, guesses that the grammar cuts, taking
tokens in), waiting for the thread beside it included: microseconds a generated token, and as a share of the step.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from cli.grammar_bench.tools import of_size, read_tools
from engine.checkpoints import DEFAULT_MODEL, default_cache_dir, resolve
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import load_engine
from engine.masks import StepMasks
from engine.speculation import speculator
from engine.speculation.speculator import Speculator
from gateway.workers.protocol import GenerateRequest, SamplingParams
from grammar.compiler import GrammarMatcher
from grammar.formats.registry import format_named
from grammar.tools import ToolChoice

PROMPT = "<|im_start|>user\nTask {n}: find order {n} of the customer and refund it.<|im_end|>\n<|im_start|>assistant\n"


class Clock:
    """Time of one thread in some methods; what they call of each other counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()
        self._inside = False

    def watch(self, owner: object, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            self._inside = True
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began
                self._inside = False

        setattr(owner, name, timed)


class AtOnce:
    """In place of the thread beside the pass: the job is done before the pass."""

    def begin(self, job: Callable[[], Any]) -> None:
        self._done = job()

    def take(self) -> Any:
        return self._done

    def close(self) -> None:
        pass


def run(engine: Engine, clock: Clock, prompts: list[list[int]], grammar: str, tokens: int, number: int) -> list[list[float]]:
    """For each step that decoded: tokens, seconds in masks and matchers, seconds of the step."""
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.8, seed=index, max_tokens=tokens)
        request = GenerateRequest(request_id=f"{number}-{index}", token_ids=prompt, sampling=sampling, grammar=grammar)
        engine.add(engine.prepare(request))
    found = []
    while engine.has_work():
        before, masks, began = engine.stats(), clock.seconds, time.perf_counter()
        engine.step()
        seconds, after = time.perf_counter() - began, engine.stats()
        if after.decode_passes_total - before.decode_passes_total:
            made = after.generated_tokens_total - before.generated_tokens_total
            found.append([made, clock.seconds - masks, seconds])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft", type=int, default=8)
    parser.add_argument("--tools", type=int, default=50)
    arguments = parser.parse_args()
    logging.basicConfig(level="ERROR")
    directory = resolve(DEFAULT_MODEL, default_cache_dir())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    grammar = format_named("hermes").structural_tag(of_size(read_tools(()), arguments.tools), ToolChoice("required"))
    clock = Clock()
    for owner, names in (
        (StepMasks, ("begin", "take", "ahead")),
        (Speculator, ("_forced",)),
        (speculator, ("_allowed",)),
        (GrammarMatcher, ("accept", "fill_bitmask")),
    ):
        for name in names:
            clock.watch(owner, name)
    # One engine for both: a second one in the process computes at half the speed, whatever it does about masks.
    engine = load_engine(EngineConfig(model=directory, num_blocks=2000, max_draft_tokens=arguments.draft))
    thread = engine._masks._thread
    sides: dict[str, Any] = {"before": AtOnce(), "beside": thread}
    number = 0
    for batch in arguments.batch or (1, 16):
        prompts = [tokenizer.encode(PROMPT.format(n=index)).ids for index in range(batch)]
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for pair in range(arguments.pairs + 1):
            for side, worker in sides.items():
                number += 1
                engine._masks._thread = worker
                figures = np.asarray(run(engine, clock, prompts, grammar, arguments.tokens, number))
                if pair == 0:
                    continue  # the grammar is compiled, the first masks of it are made
                each = 1e6 * figures[:, 1] / np.maximum(figures[:, 0], 1)
                share = figures[:, 1].sum() / figures[:, 2].sum()
                rate = figures[:, 0].sum() / figures[:, 2].sum()
                rates[side].append(rate)
                print(
                    f"batch {batch:2} pair {pair} {side:7}: microseconds a token p50 {np.percentile(each, 50):6.1f} "
                    f"p99 {np.percentile(each, 99):6.1f}; {share:6.2%} of the step of {1e3 * figures[:, 2].mean():6.2f} ms; "
                    f"{rate:6.1f} tokens a second"
                )
        ratio = statistics.median(one / other for one, other in zip(rates["beside"], rates["before"], strict=True))
        print(f"batch {batch:2}: {ratio:.3f} x the tokens a second of masks made before the pass (median of pairs)")
    engine._masks._thread = thread
    engine.close()


if __name__ == "__main__":
    main()
