"""What sampling remembers of a choice, against counting all its tokens again."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.state import SamplingState
from gateway.workers.protocol import SamplingParams

TOKENS = st.lists(st.integers(0, 300), max_size=200)


@given(prompt=TOKENS, generated=TOKENS)
@settings(max_examples=60, deadline=None)
def test_counts(prompt, generated):
    params = SamplingParams(presence_penalty=0.1, repetition_penalty=1.1)
    state = SamplingState(params, np.array(prompt, dtype=np.uint32), 0, 0, ())
    for token_id in generated:
        state.append(token_id)
    assert dict(zip(state.counts.ids.tolist(), state.counts.counts.tolist(), strict=True)) == Counter(generated)
    seen = state.seen_ids().tolist()
    assert sorted(seen) == sorted({*prompt, *generated})
    assert state.generated == len(generated)
    assert state.position == len(prompt) + len(generated)


def test_nothing_is_kept_that_no_penalty_needs():
    state = SamplingState(SamplingParams(), np.arange(100_000, dtype=np.uint32), 0, 0, ())
    for token_id in range(1000):
        state.append(token_id)
    assert len(state.counts.ids) == 0
    assert len(state.seen_ids()) == 0
    assert state.position == 101_000


def test_signed_and_unsigned_seeds_are_the_same_bits():
    assert SamplingState(SamplingParams(), np.zeros(0, dtype=np.uint32), -1, 0, ()).seed == 2**64 - 1


def test_end_ids_are_distinct_and_follow_ignore_eos():
    made = [
        SamplingState(SamplingParams(min_tokens=1, stop_token_ids=(9, 4, 9), ignore_eos=ignore), np.zeros(0), 0, 0, (4, 2))
        for ignore in (False, True)
    ]
    assert [state.end_ids.tolist() for state in made] == [[2, 4, 9], [4, 9]]
    assert [state.ends_masked for state in made] == [True, True]
    made[0].append(5)
    assert not made[0].ends_masked
