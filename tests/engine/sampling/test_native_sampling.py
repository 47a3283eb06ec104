"""Choosing in C++ against NumPy over whole vocabularies: the same token for the same random numbers, whatever is asked for."""

import numpy as np
import pytest
import torch
from test_sampler_reference import NativeSampler, native_chooser

from engine.sampling.logprobs import LEAST, most_likely
from engine.sampling.sampler import NOTHING_ALLOWED, SampledToken, Sampler
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

NONE = np.zeros(0, dtype=np.uint32)


def logits_of(rng, kind, rows, vocab):
    if kind == "model":
        ranked = -1.2 * np.log(np.arange(1, vocab + 1))
        made = np.stack([rng.permutation(ranked) for _ in range(rows)])
    elif kind == "peaked":
        made = rng.standard_normal((rows, vocab)) * 6
    elif kind == "constant":
        made = np.zeros((rows, vocab))
    else:
        made = rng.standard_normal((rows, vocab)) * rng.choice([1e-3, 0.3, 1.0])
    logits = torch.from_numpy(made.astype(np.float32))
    return logits.bfloat16().float() if kind == "coarse" else logits


def settings_of(rng):
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.05, 0.7, 1.0, 2.0, 1e6])),
        top_k=int(rng.choice([0, 0, 1, 2, 50, 700, 900, 30000])),
        top_p=float(rng.choice([1.0, 1e-6, 0.3, 0.9, 0.999, 0.9999999])),
        min_p=float(rng.choice([0.0, 0.0, 1e-9, 0.02, 1.0])),
    )


@pytest.mark.parametrize("kind", ["model", "peaked", "flat", "coarse", "constant"])
@pytest.mark.parametrize("vocab", [1, 15, 64, 65, 1000, 49152, 49153])
def test_the_same_tokens_as_numpy(kind, vocab):
    rng = np.random.default_rng([vocab, *kind.encode()])
    native, plain = NativeSampler(vocab), Sampler(vocab)
    words = (vocab + 31) // 32
    rows = 5
    for masked in (False, True):
        for _ in range(3):
            logits = logits_of(rng, kind, rows, vocab)
            seeds = rng.integers(0, 2**63, rows).tolist()
            states = [SamplingState(settings_of(rng), NONE, seed, row, ()) for row, seed in enumerate(seeds)]
            mask = None
            if masked:
                mask = torch.from_numpy(rng.integers(0, 2**32, (rows, words), dtype=np.uint32).view(np.int32))
                mask[0] = 0
                mask[1, 1:] = 0  # one word: at most 32 tokens
                mask[2] |= -1
            assert native.sample(logits, states, mask) == plain.sample(logits, states, mask)
            if masked:
                assert native.sample(logits, states, mask)[0] == SampledToken(-1, error=NOTHING_ALLOWED)


def test_many_seeds_of_a_nucleus_stay_in_it():
    """No token outside the exact nucleus ever comes, and each at its border does."""
    vocab, draws = 1000, 4000
    rng = np.random.default_rng(3)
    row = np.round(rng.standard_normal(vocab) * 2, 1)  # many ties
    probabilities = np.exp(row - row.max())
    probabilities /= probabilities.sum()
    kept = np.zeros(vocab, dtype=bool)
    for value in sorted(set(row), reverse=True):
        if probabilities[row > value].sum() >= 0.2:
            break
        kept |= row == value
    states = [SamplingState(SamplingParams(top_p=0.2), NONE, seed, 0, ()) for seed in range(draws)]
    logits = torch.from_numpy(row.astype(np.float32)).expand(draws, vocab)
    drawn = {token.token_id for token in NativeSampler(vocab).sample(logits, states)}
    assert drawn <= set(np.flatnonzero(kept).tolist())
    assert len(drawn) > 0.9 * kept.sum()


def test_rows_and_masks_that_are_views():
    vocab = 333
    rng = np.random.default_rng(9)
    logits = torch.from_numpy(rng.standard_normal((vocab, 8)).astype(np.float32)).t()[::2]
    mask = torch.from_numpy(rng.integers(0, 2**32, (4, 40), dtype=np.uint32).view(np.int32))[:, : (vocab + 31) // 32]
    states = [SamplingState(SamplingParams(temperature=0.9), NONE, seed, 0, ()) for seed in range(4)]
    wanted = Sampler(vocab).sample(logits.contiguous(), states, mask.contiguous())
    assert NativeSampler(vocab).sample(logits, states, mask) == wanted


@pytest.mark.parametrize("kind", ["model", "peaked", "coarse", "constant"])
@pytest.mark.parametrize("vocab", [1, 15, 64, 65, 1000, 49153])
def test_the_same_log_probabilities_as_torch(kind, vocab):
    rng = np.random.default_rng([vocab, 7, *kind.encode()])
    logits = logits_of(rng, kind, 6, vocab)
    logits[0, vocab // 2 :] = -torch.inf
    logits[0, 0] = 1.0
    chosen = torch.from_numpy(rng.integers(0, vocab, 6))
    tops = [20, 0, 1, 5, 2000, 20]
    got = native_chooser().report(logits, chosen, tops)
    exact = torch.log_softmax(logits.double(), dim=-1).clamp(min=LEAST)
    for row, (logprob, top) in enumerate(got):
        assert abs(logprob - exact[row, chosen[row]].item()) <= 2e-6 * max(1.0, abs(logprob))
        wanted = (
            sorted(range(vocab), key=lambda token: (-logits[row, token].item(), token))[: tops[row]] if vocab < 2000 else None
        )
        if wanted is None:
            wanted = most_likely(logits[row : row + 1], max(tops[row], 1))[0, : tops[row]].tolist()
        assert [token for token, _ in top] == wanted
        for token, value in top:
            assert abs(value - exact[row, token].item()) <= 2e-6 * max(1.0, abs(value))
