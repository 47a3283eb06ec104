"""What grammars cost while tokens are generated: filling a mask, taking a token, compiling a list of tools."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from grammar.compiler import CompiledGrammar, GrammarCompiler, allocate_bitmask

_PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds at the median and the 99th percentile, and how many were measured."""

    p50: float
    p99: float
    count: int


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Of one token: filling its mask, then taking it; and both together."""

    fill: Spread
    advance: Spread
    both: Spread


def token_cost(compiled: CompiledGrammar, generations: Sequence[Sequence[int]], vocab_size: int) -> TokenCost:
    """Walks along token sequences that the grammar accepts. Raises ValueError for one that it does not."""
    mask = allocate_bitmask(1, vocab_size)
    fills: list[float] = []
    advances: list[float] = []
    for ids in generations:
        matcher = compiled.matcher()
        for position, token in enumerate(ids):
            begun = time.perf_counter_ns()
            matcher.fill_bitmask(mask, 0)
            filled = time.perf_counter_ns()
            taken = matcher.accept(token)
            done = time.perf_counter_ns()
            if not taken:
                raise ValueError(f"The grammar does not allow token {token} at position {position}.")
            fills.append((filled - begun) / 1000)
            advances.append((done - filled) / 1000)
    both = [fill + advance for fill, advance in zip(fills, advances, strict=True)]
    return TokenCost(spread(fills), spread(advances), spread(both))


def spread(microseconds: Sequence[float]) -> Spread:
    """Of measurements."""
    p50, p99 = np.percentile(np.asarray(microseconds), _PERCENTILES)
    return Spread(float(p50), float(p99), len(microseconds))


def compile_milliseconds(make: Callable[[], GrammarCompiler], source: str, repeats: int) -> tuple[float, float]:
    """Medians for the first use of a source and the second, each with compilers that have seen nothing before."""
    first: list[float] = []
    second: list[float] = []
    for _ in range(repeats):
        compiler = make()
        try:
            for times in (first, second):
                begun = time.perf_counter()
                compiler.compile(source)
                times.append((time.perf_counter() - begun) * 1000)
        finally:
            compiler.close()
    return float(np.median(first)), float(np.median(second))
