"""Looking up many digests at once, against a dictionary."""

import hypothesis.strategies as st
from hypothesis import given, settings

from prefix_cache.block_names import BlockNames
from prefix_cache.hashing import DigestChain, JoinedDigests, join_digests

BLOCKS = 24


# Few low bits, so that digests share the places of their hints; some differ in the upper half only.
def made_of(low, middle, high):
    return bytes([low, middle, *bytes(6), high, *bytes(7)])


digests = st.builds(made_of, st.integers(0, 3), st.integers(0, 1), st.integers(0, 7))
actions = st.one_of(
    st.tuples(st.just("give"), st.integers(0, BLOCKS - 1), digests),
    st.tuples(st.just("take"), st.integers(0, BLOCKS - 1), st.none()),
    st.tuples(st.sampled_from(["ask", "ask", "clear"]), st.none(), st.lists(digests, max_size=80)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(actions, max_size=60))
def test_it_is_a_dictionary(history):
    names, model = BlockNames(BLOCKS), {}
    everything = [made_of(low, middle, high) for low in range(4) for middle in range(2) for high in range(8)]
    for what, block, given_ in history:
        if what == "give" and given_ not in model and block not in model.values():
            names.give(block, given_)
            model[given_] = block
        elif what == "take":
            digest = next((digest for digest, known in model.items() if known == block), None)
            assert names.take(block) == digest
            model.pop(digest, None)
        elif what == "clear":
            names.clear()
            model.clear()
        asked = given_ if isinstance(given_, list) else everything[block % 7 :]
        known = [model.get(digest) for digest in asked]
        first = known.index(None) if None in known else len(known)
        for form in (asked, tuple(asked), JoinedDigests(join_digests(asked)), DigestChain(join_digests(asked)), iter(asked)):
            assert names.prefix(form).tolist() == known[:first]
        there = [*model, *model, *everything]
        assert names.prefix(there).tolist()[: 2 * len(model)] == [*model.values(), *model.values()]
        assert names.known(asked).tolist() == [block for block in known if block is not None]
        assert names.inconsistency() is None
        assert len(names) == len(model)
        assert set(names) == set(model)
        assert {block for block in range(BLOCKS) if names.has[block]} == set(model.values())
        assert all(names.of(block) == digest and names.block(digest) == block for digest, block in model.items())
