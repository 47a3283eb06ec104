"""Draws against exact probabilities: chi-square with fixed seeds, so these pass always or never."""

import numpy as np
import pytest
import torch
from sampling_reference import adjusted, probabilities
from test_sampler_reference import KINDS, SAMPLERS, NativeSampler

from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

torch.set_num_threads(1)

V, DRAWS = 64, 8000
NONE = np.zeros(0, dtype=np.uint32)
PROMPT = np.arange(0, 64, 3, dtype=np.uint32)
GENERATED = (1, 1, 1, 2, 5, 8, 8)

CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=9),
    "top_p": SamplingParams(top_p=0.85),
    "min_p": SamplingParams(min_p=0.02),
    "bias": SamplingParams(logit_bias={3: 4.0, 60: -100.0}),
    "penalties": SamplingParams(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
    "all": SamplingParams(
        temperature=1.4,
        top_k=30,
        top_p=0.95,
        min_p=0.005,
        presence_penalty=0.5,
        frequency_penalty=-0.2,
        repetition_penalty=0.8,
        logit_bias={7: 1.0},
    ),
}


def chi_square_bound(degrees):
    """About the 99.99th percentile (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3


def check(drawn, expected):
    """Pearson's test of drawn ids [N] against probabilities [V]; bins of fewer than 10 expected draws are one bin."""
    counts = np.bincount(drawn, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    wanted = expected * len(drawn)
    large = wanted >= 10
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(wanted[large], wanted[~large].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 3
    assert ((observed - wanted) ** 2 / wanted).sum() < chi_square_bound(len(wanted) - 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_probabilities(kind, name):
    """Over seeds, choices and positions in turn."""
    params = CASES[name]
    row = (np.random.default_rng(4).standard_normal(V) * 1.5).astype(np.float32)
    expected = probabilities(adjusted(row, params, PROMPT.tolist(), list(GENERATED), (), None), params)
    states = []
    for draw in range(DRAWS):
        seed, choice = (draw, 0) if draw % 2 else (7, draw)
        state = SamplingState(params, PROMPT, seed, choice, ())
        for token_id in GENERATED:
            state.append(token_id)
        states.append(state)
    sampled = SAMPLERS[kind, V].sample(torch.from_numpy(row).expand(DRAWS, V), states)
    check(np.array([token.token_id for token in sampled]), expected)


def test_one_seed_along_its_positions():
    """What a single generation sees."""
    row = (np.random.default_rng(5).standard_normal(V)).astype(np.float32)
    state, drawn = SamplingState(SamplingParams(), NONE, 99, 0, ()), []
    logits = torch.from_numpy(row).unsqueeze(0)
    for _ in range(4000):
        drawn.append(SAMPLERS[Sampler, V].sample(logits, [state])[0].token_id)
        state.append(drawn[-1])
    expected = probabilities(row.astype(np.float64), SamplingParams())
    check(np.array(drawn), expected)
    pairs = np.array(drawn[:-1]) * V + np.array(drawn[1:])
    check(pairs, np.outer(expected, expected).reshape(-1))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.97)], ids=["plain", "top_p"])
@pytest.mark.parametrize("kind", [Sampler, NativeSampler])
def test_a_large_vocabulary(kind, params):
    """Every bin of ids gets its share, also of tokens of one in a million."""
    size, draws, bins = 49152, 3000, 48
    row = (np.random.default_rng(6).standard_normal(size) * 2).astype(np.float32)
    expected = probabilities(row.astype(np.float64), params)
    sampler, drawn = kind(size), []
    logits = torch.from_numpy(row).expand(100, size)
    for first in range(0, draws, 100):
        states = [SamplingState(params, NONE, seed, 0, ()) for seed in range(first, first + 100)]
        drawn += [token.token_id for token in sampler.sample(logits, states)]
    assert np.all(expected[drawn] > 0)
    check(np.array(drawn) * bins // size, np.add.reduceat(expected, range(0, size, size // bins)))
    order = np.argsort(-row)
    cumulative = np.cumsum(expected[order])
    rank = np.empty(size, dtype=np.int64)
    rank[order] = np.arange(size)
    shares = np.diff(np.append([0.0], cumulative)[[0, 10, 100, 1000, 5000, 20000, size]])
    check(np.searchsorted([10, 100, 1000, 5000, 20000], rank[drawn], side="right"), shares)
