"""The ways of choosing against the plain reference, for random parameters together and each by itself."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_reference import kept, sample

from engine.checkpoints import default_cache_dir
from engine.kernels.cpu.kernel import CpuAttention
from engine.kernels.cpu.library import KernelBuildError
from engine.kernels.cpu.sampling import CpuSampler
from engine.sampling import choose_device
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

torch.set_num_threads(1)

EOS = (1, 2)
SIZES = (33, 64, 257)


class DeviceSampler(Sampler):
    """The torch way of choosing, on the CPU."""

    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        self._cpu = None


class NativeSampler(Sampler):
    """In C++, on two threads."""

    def __init__(self, vocab_size):
        super().__init__(vocab_size, "cpu", native_chooser())


@functools.cache
def native_chooser():
    cache = Path(os.environ.get("TURNKEEP_CACHE_DIR") or default_cache_dir())
    try:
        kernel = CpuAttention.build(64, 2, cache / "kernels")
    except KernelBuildError as error:
        pytest.skip(f"no kernels here: {error}")
    return CpuSampler(kernel.library, kernel.team)


class Samplers(dict):
    """(kind, vocabulary size) -> sampler, made when it is first asked for."""

    def __missing__(self, key):
        kind, size = key
        return self.setdefault(key, kind(size))


KINDS = (Sampler, DeviceSampler, NativeSampler)
SAMPLERS = Samplers()


@dataclass
class Row:
    logits: np.ndarray
    params: SamplingParams
    prompt: list
    generated: list
    seed: int
    choice: int
    allowed: np.ndarray

    def state(self):
        state = SamplingState(self.params, np.array(self.prompt, dtype=np.uint32), self.seed, self.choice, EOS)
        for token_id in self.generated:
            state.append(token_id)
        return state

    def expected(self):
        """What may come out. Sums near top_p may fall to either side of it: so both sides are right."""
        tokens = set()
        for factor in (1 - 2e-5, 1.0, 1 + 2e-5):
            top_p = min(self.params.top_p * factor, 1.0) if self.params.top_p < 1 else 1.0
            params = msgspec.structs.replace(self.params, top_p=top_p, min_p=min(self.params.min_p * factor, 1.0))
            tokens.add(
                sample(
                    self.logits,
                    params,
                    self.prompt,
                    self.generated,
                    seed=self.seed,
                    choice=self.choice,
                    eos=EOS,
                    allowed=self.allowed,
                )
            )
        return tokens


def maybe(strategy, off):
    return st.just(off) | strategy


PARAMS = st.builds(
    SamplingParams,
    temperature=maybe(st.floats(0.05, 3.0), 0.0) | st.just(1.0),
    top_k=maybe(st.integers(1, 80), 0),
    top_p=maybe(st.floats(0.01, 0.999), 1.0),
    min_p=maybe(st.floats(0.001, 0.9), 0.0),
    presence_penalty=maybe(st.floats(-2, 2), 0.0),
    frequency_penalty=maybe(st.floats(-2, 2), 0.0),
    repetition_penalty=maybe(st.floats(0.5, 2.0), 1.0),
    logit_bias=st.dictionaries(st.integers(0, 32), st.floats(-20, 20), max_size=4),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(st.integers(0, 32), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)


def row_of(params, size, seed, *, coarse=False):
    """A row with random logits, history and mask. coarse: logits as bfloat16 has them, many of them equal."""
    random, rng = Random(seed), np.random.default_rng(seed)
    logits = (rng.standard_normal(size) * random.choice([0.5, 2, 6])).astype(np.float32)
    if coarse:
        logits = torch.from_numpy(logits).to(torch.bfloat16).to(torch.float32).numpy()
    allowed = rng.random(size) < random.choice([0.1, 0.5, 1.0])
    allowed[random.randrange(size)] = True
    return Row(
        logits=logits,
        params=params,
        prompt=[random.randrange(size) for _ in range(random.randrange(30))],
        generated=[random.randrange(size // 4) for _ in range(random.randrange(12))],
        seed=random.choice([0, 1, random.randrange(2**64), -random.randrange(2**63)]),
        choice=random.randrange(128),
        allowed=allowed,
    )


def packed(rows):
    """int32 [R, ceil(V / 32)], bit set = allowed."""
    size = len(rows[0].allowed)
    bits = np.zeros((len(rows), (size + 31) // 32 * 32), dtype=np.uint8)
    for row, bit in zip(rows, bits, strict=True):
        bit[:size] = row.allowed
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def tokens(kind, rows):
    logits = torch.from_numpy(np.stack([row.logits for row in rows]))
    before = logits.clone()
    sampled = SAMPLERS[kind, logits.shape[1]].sample(logits, [row.state() for row in rows], packed(rows))
    assert torch.equal(logits, before), "the caller's logits were changed"
    assert [token.error for token in sampled] == [None] * len(rows)
    return [token.token_id for token in sampled]


@pytest.mark.parametrize("kind", KINDS)
@given(params=st.lists(PARAMS, min_size=1, max_size=5), size=st.sampled_from(SIZES), seed=st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
@example(params=[SamplingParams(min_tokens=3, repetition_penalty=1.3)], size=33, seed=0)
def test_random_parameters(kind, params, size, seed):
    rows = [row_of(one, size, seed + index) for index, one in enumerate(params)]
    for row, token_id in zip(rows, tokens(kind, rows), strict=True):
        assert token_id in row.expected()


ALONE = {
    "temperature": [0.0, 1e-6, 0.05, 0.7, 1.0, 2.5, 100.0],
    "top_k": [1, 2, 5, 32, 64, 10**6],
    "top_p": [1e-9, 0.1, 0.5, 0.9, 0.999999],
    "min_p": [1e-6, 0.05, 0.5, 1.0],
    "presence_penalty": [-2.0, 0.3, 2.0],
    "frequency_penalty": [-2.0, 0.3, 2.0],
    "repetition_penalty": [0.01, 0.5, 1.3, 100.0],
    "logit_bias": [{3: 100.0}, {3: -100.0, 4: 5.0}],
    "min_tokens": [1, 6, 12],
    "stop_token_ids": [(3,), tuple(range(33))],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in ALONE.items() for value in values])
def test_each_parameter_by_itself(kind, field, value):
    params = SamplingParams(**({"min_tokens": 8} if field == "stop_token_ids" else {}) | {field: value})
    rows = [row_of(params, 64, seed) for seed in range(24)]
    for row, token_id in zip(rows, tokens(kind, rows), strict=True):
        assert token_id in row.expected()


@pytest.mark.parametrize("kind", KINDS)
@given(params=PARAMS, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_equal_logits(kind, params, seed):
    """bfloat16 logits tie often: ties stay or go together, greedy takes the first."""
    params = msgspec.structs.replace(params, logit_bias={}, presence_penalty=0.0, frequency_penalty=0.0)
    rows = [row_of(msgspec.structs.replace(params, repetition_penalty=1.0), 64, seed, coarse=True)]
    assert tokens(kind, rows)[0] in rows[0].expected()


@pytest.mark.parametrize("size", SIZES)
def test_both_ways_keep_the_same_tokens(size):
    """Not only the winner: the least score that each way keeps."""
    cpu = SAMPLERS[Sampler, size]._cpu
    checked = 0
    for seed in range(200):
        random = Random(seed)
        top_p = random.choice([1.0, 0.3, 0.9, 0.99])
        params = SamplingParams(
            top_k=random.choice([0, 1, 7, 30, size]), top_p=top_p, min_p=random.choice([0.0, 0.01, 0.2]), temperature=0.8
        )
        row = row_of(params, size, seed)
        keep, scores = kept(row.logits.astype(np.float64), params)
        cpu._scores[:] = scores
        least = cpu._threshold(params.top_k, params.top_p, params.min_p)
        on_device = choose_device._thresholds(
            torch.from_numpy(scores.astype(np.float32)).unsqueeze(0),
            torch.tensor([params.top_k or size]),
            torch.tensor([params.top_p], dtype=torch.float64),
            torch.tensor([params.min_p], dtype=torch.float64),
        ).item()
        scores32 = scores.astype(np.float32)
        assert ((scores32 >= least) == (scores32 >= on_device)).all()
        assert ((scores32 >= least) == keep).all()
        checked += keep.sum() not in (1, size)
    assert checked > 80
