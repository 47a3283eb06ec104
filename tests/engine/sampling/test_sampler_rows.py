"""What a row gets: greedy tokens, log-probabilities, masks, errors, and nothing of its neighbours."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler_reference import EOS, KINDS, PARAMS, SAMPLERS, NativeSampler, packed, row_of
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling.logprobs import LEAST, by_integer_keys, most_likely
from engine.sampling.sampler import BROKEN_LOGITS, NOTHING_ALLOWED, SampledToken, Sampler
from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

EACH = pytest.mark.parametrize("kind", KINDS)
V = 64


def state(params, prompt=(), generated=(), *, seed=0, choice=0):
    made = SamplingState(params, np.array(prompt, dtype=np.uint32), seed, choice, EOS)
    for token_id in generated:
        made.append(token_id)
    return made


def random_logits(rows, size=V, seed=0):
    return torch.from_numpy((np.random.default_rng(seed).standard_normal((rows, size)) * 4).astype(np.float32))


def words(*allowed, size=V):
    bits = np.zeros((len(allowed), size), dtype=np.uint8)
    for row, ids in zip(bits, allowed, strict=True):
        row[list(ids)] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@EACH
def test_greedy_is_argmax(kind):
    logits = random_logits(300)
    sampled = SAMPLERS[kind, V].sample(logits, [state(SamplingParams(temperature=0.0))] * 300)
    assert sampled == [SampledToken(token_id) for token_id in logits.argmax(dim=-1).tolist()]


@EACH
def test_greedy_takes_the_first_of_equals(kind):
    logits = torch.zeros(3, V)
    logits[1, [7, 9]] = 1.0
    logits[2, [63, 62]] = 1.0
    sampled = SAMPLERS[kind, V].sample(logits, [state(SamplingParams(temperature=0.0))] * 3)
    assert [token.token_id for token in sampled] == [0, 7, 62]


@EACH
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 9e-6, 1.1e-5, 1e-4])
def test_tiny_temperatures_are_as_good_as_greedy(kind, temperature):
    logits = random_logits(50) * 1e4
    sampled = SAMPLERS[kind, V].sample(logits, [state(SamplingParams(temperature=temperature), seed=s) for s in range(50)])
    assert [token.token_id for token in sampled] == logits.argmax(dim=-1).tolist()


@EACH
def test_logprobs_are_log_softmax_of_the_models_own_logits(kind):
    """Before grammar, bias, penalties and temperature."""
    rows = 40
    params = SamplingParams(
        temperature=0.3, logprobs=4, logit_bias={5: 50.0}, repetition_penalty=2.0, presence_penalty=1.0, top_k=3
    )
    logits = random_logits(rows)
    states = [state(params, prompt=range(9), generated=(3, 4), seed=seed) for seed in range(rows)]
    sampled = SAMPLERS[kind, V].sample(logits, states, words(*[[5, 9]] * rows))
    expected = torch.log_softmax(logits, dim=-1)
    values, ids = expected.topk(4, dim=-1)
    for row, token in enumerate(sampled):
        assert token.token_id == 5
        assert token.logprob == pytest.approx(expected[row, 5].item(), rel=1e-6)
        assert [token_id for token_id, _ in token.top] == ids[row].tolist()
        assert [value for _, value in token.top] == pytest.approx(values[row].tolist(), rel=1e-6, abs=1e-6)


@EACH
def test_each_row_gets_as_many_logprobs_as_it_asks_for(kind):
    asked = [None, 0, 1, 20, None, 3]
    logits = random_logits(6)
    sampled = SAMPLERS[kind, V].sample(logits, [state(SamplingParams(logprobs=count)) for count in asked])
    assert [len(token.top) for token in sampled] == [0, 0, 1, 20, 0, 3]
    assert [token.logprob is None for token in sampled] == [count is None for count in asked]


@EACH
def test_logprobs_for_a_vocabulary_smaller_than_asked(kind):
    token = kind(3).sample(random_logits(1, 3), [state(SamplingParams(logprobs=20))])[0]
    assert sorted(token_id for token_id, _ in token.top) == [0, 1, 2]


@EACH
def test_impossible_tokens_have_a_finite_logprob(kind):
    logits = torch.full((1, V), -math.inf)
    logits[0, 3] = 2.0
    token = SAMPLERS[kind, V].sample(logits, [state(SamplingParams(logprobs=2))])[0]
    assert token == SampledToken(3, 0.0, ((3, 0.0), (0, LEAST)))


@given(seed=st.integers(0, 2**32), count=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_most_likely_puts_equals_in_order_of_their_ids(seed, count):
    coarse = np.random.default_rng(seed).integers(-3, 3, (3, 50)).astype(np.float32) / 2
    coarse[coarse == 0] *= np.random.default_rng(seed).choice([-1.0, 1.0], (coarse == 0).sum()).astype(np.float32)  # -0 too
    expected = [np.lexsort((np.arange(50), -row))[:count].tolist() for row in coarse]
    logits = torch.from_numpy(coarse)
    assert most_likely(logits, count).tolist() == expected
    assert by_integer_keys(logits, count).tolist() == expected


def test_integer_keys_order_all_floats():
    bits = np.random.default_rng(5).integers(-(2**31), 2**31, (20, 400)).astype(np.int32)
    values = np.nan_to_num(bits.view(np.float32), nan=1.0, posinf=np.inf, neginf=-np.inf)
    logits = torch.from_numpy(values)
    assert by_integer_keys(logits, 400).tolist() == most_likely(logits, 400).tolist()


@EACH
def test_a_mask_allows_what_its_bits_say(kind):
    """Bit i of word w is token 32 w + i; the vocabulary may end inside a word."""
    sampler = kind(70)
    allowed = [[0], [31], [32], [63], [64], [69], [5, 33]]
    logits = random_logits(7, 70)
    sampled = sampler.sample(logits, [state(SamplingParams(), seed=3)] * 7, words(*allowed, size=96))
    assert [token.token_id for token in sampled[:6]] == [0, 31, 32, 63, 64, 69]
    assert sampled[6].token_id in (5, 33)


@EACH
def test_a_mask_of_all_ones_forbids_nothing(kind):
    logits = random_logits(9)
    states = [state(SamplingParams(), seed=seed) for seed in range(9)]
    ones = torch.full((9, 2), -1, dtype=torch.int32)
    assert SAMPLERS[kind, V].sample(logits, states, ones) == SAMPLERS[kind, V].sample(logits, states)


@EACH
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0, logprobs=1), SamplingParams(top_p=0.9, top_k=9, logprobs=1)]
)
def test_a_bad_row_fails_alone(kind, params):
    rows = 8
    logits = random_logits(rows)
    good = SAMPLERS[kind, V].sample(logits, [state(params, seed=seed) for seed in range(rows)])
    logits[1, 5] = math.nan
    logits[2, 60] = math.inf
    logits[3] = -math.inf
    logits[4] = math.nan
    mask = torch.full((rows, 2), -1, dtype=torch.int32)
    mask[5] = 0
    sampled = SAMPLERS[kind, V].sample(logits, [state(params, seed=seed) for seed in range(rows)], mask)
    for row in (1, 2, 3, 4):
        assert sampled[row] == SampledToken(-1, error=BROKEN_LOGITS)
    assert sampled[5] == SampledToken(-1, error=NOTHING_ALLOWED)
    for row in (0, 6, 7):
        assert sampled[row] == good[row]


@EACH
def test_nan_that_the_mask_hides_is_still_an_error(kind):
    logits = random_logits(1)
    logits[0, 3] = math.nan
    assert SAMPLERS[kind, V].sample(logits, [state(SamplingParams())], words([4]))[0].error == BROKEN_LOGITS


@EACH
def test_a_mask_that_allows_only_what_the_model_rules_out(kind):
    logits = random_logits(1)
    logits[0, 4] = -math.inf
    assert SAMPLERS[kind, V].sample(logits, [state(SamplingParams())], words([4]))[0].error == NOTHING_ALLOWED


@EACH
def test_end_tokens_wait_for_min_tokens(kind):
    """EOS (1, 2) and the stop id lead by far, and come as soon as they may."""
    logits = torch.zeros(1, V)
    logits[0, [1, 2, 7]] = torch.tensor([50.0, 60.0, 70.0])
    one = state(SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(7,)))
    chosen = []
    for _ in range(5):
        token = SAMPLERS[kind, V].sample(logits, [one])[0]
        chosen.append(token.token_id)
        one.append(token.token_id)
    assert chosen == [0, 0, 0, 7, 7]


@EACH
def test_ignored_eos_is_not_masked(kind):
    logits = torch.zeros(1, V)
    logits[0, 1] = 50.0
    token = SAMPLERS[kind, V].sample(logits, [state(SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True))])[0]
    assert token.token_id == 1


@EACH
def test_a_grammar_that_ends_goes_before_min_tokens(kind):
    """Rows where only an end token is left get it; the others do not, and no row gets one that the grammar forbids."""
    params = SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(7,))
    logits = torch.zeros(3, V)
    logits[:, 1] = 9.0
    sampled = SAMPLERS[kind, V].sample(logits, [state(params)] * 3, words([2, 7], [1, 30], [7]))
    assert [token.token_id for token in sampled] == [2, 30, 7]


@EACH
def test_an_end_token_that_the_head_lacks_is_harmless(kind):
    one = SamplingState(SamplingParams(min_tokens=1, temperature=0.0), np.zeros(0, dtype=np.uint32), 0, 0, (1, V + 5))
    logits = torch.zeros(1, V)
    logits[0, 1], logits[0, 9] = 5.0, 4.0
    assert SAMPLERS[kind, V].sample(logits, [one])[0].token_id == 9


@EACH
def test_an_empty_batch(kind):
    assert SAMPLERS[kind, V].sample(torch.zeros(0, V), []) == []


@EACH
def test_shapes_that_do_not_fit(kind):
    sampler, one = SAMPLERS[kind, V], state(SamplingParams())
    for logits in (torch.zeros(1, V + 1), torch.zeros(2, V), torch.zeros(1, V, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"must be float32 \[1, 64\]"):
            sampler.sample(logits, [one])
    for mask in (torch.zeros(1, 3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(1, 2)):
        with pytest.raises(ValueError, match=r"must be int32 \[1, 2\]"):
            sampler.sample(torch.zeros(1, V), [one], mask)


@EACH
def test_logits_may_be_a_view(kind):
    wide = random_logits(6, 2 * V)
    states = [state(SamplingParams(presence_penalty=1.0), generated=(3,), seed=seed) for seed in range(3)]
    view = wide[::2, :V]
    assert SAMPLERS[kind, V].sample(view, states) == SAMPLERS[kind, V].sample(view.contiguous(), states)
    assert wide.equal(random_logits(6, 2 * V))


@EACH
@given(params=st.lists(PARAMS, min_size=2, max_size=6), seed=st.integers(0, 2**32), order=st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_row_is_the_same_alone_and_among_others(kind, params, seed, order):
    """Tokens and log-probabilities, bit for bit, whatever stands before and after; one neighbour is broken."""
    count = len(params)
    rows = [row_of(one, 257, seed + index) for index, one in enumerate(params)]
    states = [row.state() for row in rows]
    for one, logprobs in zip(states, (3, None, 0, 20, 1, None), strict=False):
        one.params = msgspec.structs.replace(one.params, logprobs=logprobs)
    logits = torch.from_numpy(np.stack([row.logits for row in rows]))
    mask, sampler = packed(rows), SAMPLERS[kind, 257]
    alone = [sampler.sample(logits[i : i + 1], states[i : i + 1], mask[i : i + 1])[0] for i in range(count)]
    shuffled = list(range(count))
    order.shuffle(shuffled)
    broken = torch.full((1, 257), math.nan)
    together = sampler.sample(
        torch.cat([logits[shuffled], broken]),
        [states[index] for index in shuffled] + [state(SamplingParams(top_p=0.5, logprobs=2))],
        torch.cat([mask[shuffled], mask[:1]]),
    )
    assert together[-1].error == BROKEN_LOGITS
    assert together[:-1] == [alone[index] for index in shuffled]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [Sampler, NativeSampler])
def test_large_rows_are_the_same_alone_and_among_others(kind, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        size = 49152
        sampler = kind(size)
        logits = random_logits(12, size)
        params = [
            SamplingParams(logprobs=5),
            SamplingParams(top_p=0.95, temperature=2.0, logprobs=1),
            SamplingParams(top_k=40, repetition_penalty=1.2, logprobs=0),
            SamplingParams(min_p=0.001, frequency_penalty=0.4),
        ]
        states = [state(params[row % 4], range(row * 50), (5, 6), seed=row) for row in range(12)]
        together = sampler.sample(logits, states)
        assert together == [sampler.sample(logits[row : row + 1], states[row : row + 1])[0] for row in range(12)]
        assert together[::-1] == sampler.sample(logits.flip(0), states[::-1])
        assert len({token.token_id for token in together}) == 12
    finally:
        torch.set_num_threads(before)


def test_a_generation_goes_on_elsewhere_with_the_same_numbers():
    """What was generated becomes part of the prompt, as after a worker's death: same positions, same tokens."""
    sampler, params = SAMPLERS[Sampler, V], SamplingParams(temperature=1.5)
    logits = random_logits(20)

    def go_on(one, first):
        out = []
        for step in range(first, 20):
            out.append(sampler.sample(logits[step : step + 1], [one])[0].token_id)
            one.append(out[-1])
        return out

    whole = go_on(state(params, range(5), seed=11), 0)
    assert go_on(state(params, [*range(5), *whole[:8]], seed=11), 8) == whole[8:]
    assert go_on(state(params, range(5), seed=12), 0) != whole
    assert go_on(state(params, range(5), seed=11, choice=1), 0) != whole


WARPERS = [
    (SamplingParams(repetition_penalty=1.4), RepetitionPenaltyLogitsProcessor(1.4)),
    (SamplingParams(temperature=0.6, top_k=7), LogitsProcessorList([TemperatureLogitsWarper(0.6), TopKLogitsWarper(7)])),
    (SamplingParams(top_p=0.8), TopPLogitsWarper(0.8)),
    (SamplingParams(temperature=2.0, min_p=0.1), LogitsProcessorList([TemperatureLogitsWarper(2.0), MinPLogitsWarper(0.1)])),
]


@EACH
@pytest.mark.parametrize(("params", "warper"), WARPERS, ids=["repetition", "top_k", "top_p", "min_p"])
def test_transformers_keeps_the_same_tokens(kind, params, warper):
    """Only tokens that transformers keeps come out, and all of them do; a penalty gives its very argmax."""
    prompt, generated = list(range(0, 40, 2)), [41, 43, 41]
    logits = random_logits(1, V, seed=8) / 3
    warped = warper(torch.tensor([prompt + generated]), logits.clone())[0]
    if params.repetition_penalty != 1.0:
        params = SamplingParams(repetition_penalty=1.4, temperature=0.0)
        for seed in range(50):
            logits = random_logits(1, V, seed=seed)
            expected = warper(torch.tensor([prompt + generated]), logits.clone()).argmax().item()
            assert SAMPLERS[kind, V].sample(logits, [state(params, prompt, generated)])[0].token_id == expected
        return
    states = [state(params, prompt, generated, seed=seed) for seed in range(4000)]
    came = {token.token_id for token in SAMPLERS[kind, V].sample(logits.expand(4000, V), states)}
    assert came == set(torch.isfinite(warped).nonzero().flatten().tolist())
