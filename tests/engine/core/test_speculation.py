"""Guessing changes how many passes a generation takes, and nothing else."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from engine_harness import Driver, generate, make_engine, random_prompt
from hypothesis import given, settings

from engine.models.registry import load_model
from engine.sampling.state import SamplingState
from engine.speculation.drafts import Drafter
from engine.speculation.lengths import DraftLength
from engine.speculation.ngrams import History, continuation
from gateway.workers.protocol import SamplingParams

TOKENS = st.lists(st.integers(0, 3), min_size=0, max_size=60)


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    """float64, so that the shape of a pass cannot turn a near tie."""
    return load_model(tiny_checkpoint("llama", num_hidden_layers=2), dtype=torch.float64)


class Oracle(Drafter):
    """Knows what will be generated, and is wrong about every `wrong`-th position (0: never)."""

    name = "oracle"

    def __init__(self, outputs, wrong=0):
        self.outputs, self.wrong = outputs, wrong

    def draft(self, asks, running):
        return [self.guess(ask) for ask in asks]

    def guess(self, ask):
        sequence = ask.sequence
        known = self.outputs.get((tuple(sequence.request.prompt.tolist()), sequence.index), [])
        start = len(sequence.output) + len(ask.after)
        guess = []
        for at, token in enumerate(known[start : start + ask.limit], start):
            guess.append((token + 1) % 320 if self.wrong and at % self.wrong == 0 else token)
        return guess


@given(history=TOKENS, limit=st.integers(0, 9), least=st.integers(1, 4))
def test_a_continuation_followed_the_longest_latest_match(history, limit, least):
    size = len(history)
    best, start = 0, None
    for end in range(size - 1):
        length = 0
        while length < 16 and length <= end and history[end - length] == history[size - 1 - length]:
            length += 1
        if length >= max(best, 1):
            best, start = length, end + 1
    expected = history[start : start + limit] if start is not None and best >= least and size > least else []
    assert continuation(np.asarray(history, dtype=np.uint32), limit, least) == expected


@given(prompt=TOKENS, pieces=st.lists(st.lists(st.integers(0, 3), max_size=300), max_size=5))
def test_a_history_grows_with_its_sequence(prompt, pieces):
    history, output = History(np.asarray(prompt, dtype=np.uint32)), []
    for piece in pieces:
        output += piece
        assert history.tokens(len(prompt), output).tolist() == prompt + output


@given(st.integers(1, 16), st.lists(st.floats(0, 1), max_size=200))
def test_lengths_stay_within_bounds_and_always_come_back(longest, shares):
    length = DraftLength(longest)
    for share in shares:
        waited = 0
        while not (count := length.next()):
            waited += 1
            assert waited <= 64
        assert 1 <= count <= longest
        length.verified(count, int(share * count))


def test_text_that_never_repeats_costs_a_guess_in_64():
    length, guessed = DraftLength(8), 0
    for _ in range(2000):
        if count := length.next():
            guessed += 1
            length.verified(count, 0)
    assert guessed < 45
    length.verified(1, 1)
    assert length.next()


@given(tokens=st.lists(st.integers(0, 9), max_size=12), more=st.lists(st.integers(0, 9), max_size=4))
def test_a_state_ahead_is_what_it_will_be(tokens, more):
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=1.2, min_tokens=9, stop_token_ids=(3,))
    state = SamplingState(params, np.asarray([1, 2], dtype=np.uint32), 5, 0, (0,))
    for token in tokens:
        state.append(token)
    later = state.ahead(more)
    assert state.position == 2 + len(tokens)
    for token in more:
        state.append(token)
    assert (later.position, later.ends_masked) == (state.position, state.ends_masked)
    assert later.seen_ids().tolist() == state.seen_ids().tolist()
    assert (later.counts.ids.tolist(), later.counts.counts.tolist()) == (
        state.counts.ids.tolist(),
        state.counts.counts.tolist(),
    )


asks = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(5, 40),
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "n": st.sampled_from([1, 1, 2]),
        "stop_token_ids": st.sampled_from([(), tuple(range(40, 60))]),
        "min_tokens": st.sampled_from([0, 0, 5]),
        "logprobs": st.sampled_from([None, 2]),
    }
)


@settings(deadline=None, max_examples=40)
@given(
    mix=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30), asks), min_size=1, max_size=5),
    wrong=st.sampled_from([0, 1, 2, 3, 7]),
    draft=st.integers(1, 12),
    batch=st.integers(1, 6),
    blocks=st.integers(30, 60),
    budget=st.integers(8, 40),
)
def test_whatever_is_guessed_everybody_gets_the_same_tokens(model, mix, wrong, draft, batch, blocks, budget):
    """An oracle that is sometimes wrong, few blocks, small steps: tokens, log-probabilities and ends are as without it."""
    plain, expected, outputs = make_engine(model, max_draft_tokens=0), {}, {}
    for number, (seed, length, ask) in enumerate(mix):
        prompt = random_prompt(seed, length)
        driver = Driver(plain)
        driver.add("only", prompt, seed=number, ignore_eos=False, **ask)
        expected[f"r{number}"] = seen = driver.run()["only"]
        for index, tokens in seen.tokens.items():
            outputs[tuple(prompt), index] = tokens
    engine = make_engine(
        model,
        num_blocks=blocks,
        max_num_batched_tokens=budget,
        max_draft_tokens=draft,
        max_draft_batch=batch,
        drafters=[Oracle(outputs, wrong)],
    )
    driver = Driver(engine)
    for number, (seed, length, ask) in enumerate(mix):
        driver.add(f"r{number}", random_prompt(seed, length), seed=number, ignore_eos=False, **ask)
    for name, seen in driver.run().items():
        assert seen.failed is None
        assert seen.tokens == expected[name].tokens
        assert seen.finished == expected[name].finished
        assert seen.done.completion_tokens == expected[name].done.completion_tokens
        for index, reported in seen.logprobs.items():
            assert [one.token_id for one in reported] == [one.token_id for one in expected[name].logprobs[index]]
            assert [one.logprob for one in reported] == pytest.approx([one.logprob for one in expected[name].logprobs[index]])
    stats = engine.stats()
    assert stats.accepted_tokens_total <= stats.drafted_tokens_total
    if wrong == 1:
        assert stats.accepted_tokens_total == 0


def test_guesses_that_come_true_save_passes_and_leave_whole_blocks_behind(model):
    prompt = random_prompt(1, 30)
    (expected,) = generate(make_engine(model, max_draft_tokens=0), prompt, max_tokens=60)
    engine = make_engine(model, max_draft_tokens=8, drafters=[Oracle({(tuple(prompt), 0): expected})])
    assert generate(engine, prompt, max_tokens=60) == [expected]
    stats = engine.stats()
    # The first token comes from the prompt's pass; the guesses grow from four to eight.
    assert stats.accepted_tokens_total >= 50
    assert stats.decode_passes_total <= 9
    # The next turn finds all that was computed.
    driver = Driver(engine)
    driver.add("next", prompt + expected)
    assert driver.run()["next"].started.cached_tokens == (30 + 59) // 4 * 4


def test_a_batch_that_is_too_large_guesses_nothing(model):
    prompts = [random_prompt(seed, 12) for seed in range(3)]
    known = {(tuple(p), 0): generate(make_engine(model, max_draft_tokens=0), p, max_tokens=30)[0] for p in prompts}
    for batch, guesses in ((2, False), (3, True)):
        driver = Driver(make_engine(model, max_draft_batch=batch, drafters=[Oracle(known)]))
        for number, prompt in enumerate(prompts):
            driver.add(str(number), prompt, max_tokens=30)
        seen = driver.run()
        assert [seen[str(number)].tokens[0] for number in range(3)] == list(known.values())
        assert (driver.engine.stats().drafted_tokens_total > 0) is guesses


def test_what_the_sequence_repeats_is_guessed_from_itself(model):
    """A tiny model in greedy falls into a loop; from then on most tokens are guessed."""
    prompt = random_prompt(3, 20)
    (expected,) = generate(make_engine(model, max_draft_tokens=0), prompt, max_tokens=200)
    engine = make_engine(model)
    assert generate(engine, prompt, max_tokens=200) == [expected]
    stats = engine.stats()
    looped = len(set(expected[-60:])) < 30
    assert not looped or stats.decode_passes_total < 170
    assert stats.accepted_tokens_total == 199 - stats.decode_passes_total
