"""Choosing in Triton against the plain reference and against NumPy: the same token for the same random numbers."""

import math

import numpy as np
import pytest
import test_sampler_reference as reference
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import variate
from test_native_sampling import NONE, logits_of, settings_of

from engine.kernels.triton.device.sampling import log_exponential
from engine.kernels.triton.sampling import TritonSampler
from engine.sampling.choose_device import log_exponential as torch_log_exponential
from engine.sampling.logprobs import LEAST, most_likely
from engine.sampling.philox import stream_keys
from engine.sampling.sampler import BROKEN_LOGITS, NOTHING_ALLOWED, SampledToken, Sampler
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams


class InTriton(Sampler):
    def __init__(self, vocab_size):
        super().__init__(vocab_size, "cpu", TritonSampler())


@triton.jit
def _log_exponentials(keys, out, count: tl.constexpr):
    row = tl.program_id(0)
    tokens = tl.arange(0, count)
    tl.store(out + row * count + tokens, log_exponential(tl.load(keys + row).to(tl.uint64, bitcast=True), tokens))


def test_the_logarithms_of_the_variates_are_exact_to_a_few_units():
    """Over variates down to 1e-5, from where the winners come."""
    keys = stream_keys([1, 2**64 - 1, 77], [0, 3, 127], [5, 2**40, 0])
    count = 1 << 15
    got = torch.empty(3, count)
    _log_exponentials[(3,)](torch.from_numpy(keys.view(np.int64)), got, count=count)
    exact = np.array([[math.log(variate(int(key), token)) for token in range(count)] for key in keys])
    assert exact.min() < math.log(5e-5)
    error = np.abs(got.numpy() - exact)
    assert error[exact < 0].max() < 1e-6
    # Near u = 1 the number itself is rounded, in the same way everywhere.
    assert (got - torch_log_exponential(torch.from_numpy(keys.view(np.int64)), count)).abs().max() < 2e-6


@given(
    params=st.lists(reference.PARAMS, min_size=1, max_size=5),
    size=st.sampled_from(reference.SIZES),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=8, deadline=None)
def test_random_parameters(params, size, seed):
    rows = [reference.row_of(one, size, seed + index) for index, one in enumerate(params)]
    for row, token_id in zip(rows, reference.tokens(InTriton, rows), strict=True):
        assert token_id in row.expected()


@pytest.mark.parametrize("field", reference.ALONE)
def test_each_parameter_by_itself(field):
    rows = []
    for value in reference.ALONE[field]:
        params = SamplingParams(**({"min_tokens": 8} if field == "stop_token_ids" else {}) | {field: value})
        rows += [reference.row_of(params, 64, seed) for seed in range(3)]
    for row, token_id in zip(rows, reference.tokens(InTriton, rows), strict=True):
        assert token_id in row.expected()


def test_equal_logits():
    """bfloat16 logits tie often: ties stay or go together, greedy takes the first."""
    rng = np.random.default_rng(5)
    rows = [reference.row_of(settings_of(rng), 64, seed, coarse=True) for seed in range(12)]
    for row, token_id in zip(rows, reference.tokens(InTriton, rows), strict=True):
        assert token_id in row.expected()


@pytest.mark.parametrize(
    ("kind", "vocab"), [("constant", 1), ("model", 65), ("flat", 65), ("coarse", 9001), ("peaked", 9001), ("constant", 5000)]
)
def test_the_same_tokens_as_numpy(kind, vocab):
    """Several chunks, several passes of the program of a row, and one of each."""
    rng = np.random.default_rng([vocab, *kind.encode()])
    mine, plain = InTriton(vocab), Sampler(vocab)
    words = (vocab + 31) // 32
    rows = 6
    for masked in (False, True):
        logits = logits_of(rng, kind, rows, vocab)
        seeds = rng.integers(0, 2**63, rows).tolist()
        states = [SamplingState(settings_of(rng), NONE, seed, row, ()) for row, seed in enumerate(seeds)]
        mask = None
        if masked:
            mask = torch.from_numpy(rng.integers(0, 2**32, (rows, words), dtype=np.uint32).view(np.int32))
            mask[0] = 0
            mask[1, 1:] = 0  # one word: at most 32 tokens
            mask[2] |= -1
        sampled = mine.sample(logits, states, mask)
        assert sampled == plain.sample(logits, states, mask)
        if masked:
            assert sampled[0] == SampledToken(-1, error=NOTHING_ALLOWED)


def test_a_vocabulary_of_todays_size():
    vocab = 49153
    rng = np.random.default_rng(11)
    logits = logits_of(rng, "model", 3, vocab)
    asked = (
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(temperature=0.0),
    )
    states = [SamplingState(params, NONE, 7, row, ()) for row, params in enumerate(asked)]
    assert InTriton(vocab).sample(logits, states) == Sampler(vocab).sample(logits, states)


def test_a_broken_row_does_not_touch_its_neighbours():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    logits[1, 17], logits[2, 99] = torch.nan, torch.inf
    states = [SamplingState(SamplingParams(temperature=0.7, top_p=0.8), NONE, 3, row, ()) for row in range(4)]
    sampled = InTriton(100).sample(logits, states)
    assert sampled == Sampler(100).sample(logits, states)
    assert [token.error for token in sampled] == [None, BROKEN_LOGITS, BROKEN_LOGITS, None]


def test_rows_and_masks_that_are_views():
    vocab = 333
    rng = np.random.default_rng(9)
    logits = torch.from_numpy(rng.standard_normal((vocab, 8)).astype(np.float32)).t()[::2]
    mask = torch.from_numpy(rng.integers(0, 2**32, (4, 40), dtype=np.uint32).view(np.int32))[:, : (vocab + 31) // 32]
    states = [SamplingState(SamplingParams(temperature=0.9), NONE, seed, 0, ()) for seed in range(4)]
    assert InTriton(vocab).sample(logits, states, mask) == Sampler(vocab).sample(logits, states, mask)


@pytest.mark.parametrize(("kind", "vocab"), [("constant", 1), ("coarse", 65), ("model", 9001)])
def test_log_probabilities(kind, vocab):
    rng = np.random.default_rng([vocab, 7, *kind.encode()])
    logits = logits_of(rng, kind, 6, vocab)
    logits[0, vocab // 2 :] = -torch.inf
    logits[0, 0] = 1.0
    chosen = torch.from_numpy(rng.integers(0, vocab, 6))
    exact = torch.log_softmax(logits.double(), dim=-1).clamp(min=LEAST)
    for tops in ([20, 0, 1, 5, 7, 20], [0] * 6, [2000, 0, 1, 70, 7, 20]):
        ids = most_likely(logits, min(max(*tops, 1), vocab)).tolist()
        for row, (logprob, top) in enumerate(TritonSampler().report(logits, chosen, tops)):
            assert abs(logprob - exact[row, chosen[row]].item()) <= 2e-6 * max(1.0, abs(logprob))
            assert [token for token, _ in top] == ids[row][: tops[row]]
            for token, value in top:
                assert abs(value - exact[row, token].item()) <= 2e-6 * max(1.0, abs(value))
