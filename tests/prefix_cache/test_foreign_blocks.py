"""KV events of workers that hash in their own way, under our names."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.events import DEVICE, HOST, AllCleared, BlocksRemoved, BlocksStored, EventBatch
from prefix_cache.foreign_blocks import ForeignBlocks
from prefix_cache.hashing import block_digests, namespace_digest, root_digest, split_digests
from prefix_cache.index import ResidencyIndex
from prefix_cache.vllm_wire import (
    ForeignCleared,
    ForeignRemoved,
    ForeignStored,
    decode_batch,
    encode_batch,
)

ROOT = namespace_digest({"model": "m"})
LORA = namespace_digest({"model": "m", "adapter": "a"})


def roots(adapter, salt):
    if adapter not in (None, "a"):
        return None
    return root_digest(ROOT if adapter is None else LORA, salt)


def blocks(size=4, **options):
    return ForeignBlocks(roots, size, **options)


def stored(hashes, tokens, parent=None, size=4, **more):
    return ForeignStored(tuple(hashes), parent, tuple(tokens), size, **more)


def test_chains_get_our_digests_under_adapter_and_salt():
    known = blocks()
    tokens = list(range(12))
    first = known.apply(stored([b"x", b"y"], tokens[:8]))
    second = known.apply(stored([77], tokens[8:], parent=b"y"))
    ours = block_digests(tokens, ROOT, 4)
    assert first == [BlocksStored(b"".join(ours[:2]), ROOT)]
    assert second == [BlocksStored(ours[2], ours[1])]
    salted = known.apply(stored([b"z"], tokens[:4], lora_name="a", salt="s"))
    assert salted == [BlocksStored(block_digests(tokens[:4], root_digest(LORA, "s"), 4)[0], root_digest(LORA, "s"))]


def test_a_large_block_is_several_of_ours_and_goes_as_one():
    known = blocks(size=4)
    ours = block_digests(list(range(16)), ROOT, 4)
    assert known.apply(stored([1, 2], range(16), size=8, medium="CPU")) == [BlocksStored(b"".join(ours), ROOT, HOST)]
    assert known.apply(ForeignRemoved((2,), "CPU")) == [BlocksRemoved(b"".join(ours[2:]), HOST)]
    assert known.apply(ForeignRemoved((1,), "GPU")) == []
    assert len(known) == 1


def test_what_cannot_be_named_is_counted_and_left_out():
    known = blocks()
    assert known.apply(stored([2], range(4), parent=1)) == []
    assert known.apply(stored([2], range(4), lora_name="stranger")) == []
    assert known.unknown_parents == 2
    assert known.apply(stored([1], range(3))) == []
    assert known.apply(stored([1, 2], range(4))) == []
    assert known.apply(stored([1], range(4), plain=False)) == []
    assert known.apply(stored([1], range(2), size=2)) == []
    assert known.not_named == 4
    assert known.apply(stored([1], range(4), group=1)) == []
    assert known.apply(ForeignRemoved((9,))) == []
    assert len(known) == 0


def test_memory_is_bounded_and_what_is_dropped_is_said():
    known = blocks(max_blocks=2)
    for number in range(100):
        changed = known.apply(stored([number], [number] * 4))
        assert len(known) <= 2
        if number >= 2:
            assert changed[-1] == BlocksRemoved(block_digests([number - 2] * 4, ROOT, 4)[0], DEVICE)
    assert known.apply(ForeignCleared()) == [AllCleared()]
    assert len(known) == 0


def test_a_name_that_means_something_else_replaces_what_it_meant():
    known = blocks()
    known.apply(stored([1], [1] * 4))
    changed = known.apply(stored([1], [2] * 4))
    assert changed == [
        BlocksRemoved(block_digests([1] * 4, ROOT, 4)[0], DEVICE),
        BlocksStored(block_digests([2] * 4, ROOT, 4)[0], ROOT),
    ]


@st.composite
def lives(draw):
    """Prompts over a tiny alphabet, stored block by block with their true parents, and random removals between."""
    steps = []
    for _ in range(draw(st.integers(1, 30))):
        if steps and draw(st.booleans()):
            steps.append(("remove", draw(st.integers(0, 40))))
        else:
            steps.append(("store", draw(st.lists(st.integers(0, 1), min_size=2, max_size=12))))
    return steps


@given(lives())
def test_the_index_says_what_the_worker_holds(steps):
    """A worker that names blocks by the tokens up to them: whatever happens, the index finds exactly the resident prefixes."""
    known, index, held = blocks(size=2), ResidencyIndex(), {}
    seq = 0
    for kind, what in steps:
        if kind == "remove":
            if not held:
                continue
            name = sorted(held)[what % len(held)]
            del held[name]
            events = known.apply(ForeignRemoved((name,)))
        else:
            full = [tuple(what[: end + 2]) for end in range(0, len(what) - 1, 2)]
            names = [repr(prefix).encode() for prefix in full]
            fresh = next((i for i, name in enumerate(names) if name not in held), len(names))
            if fresh == len(names):
                continue
            tokens = [token for prefix in full[fresh:] for token in prefix[-2:]]
            parent = names[fresh - 1] if fresh else None
            events = known.apply(stored(names[fresh:], tokens, parent, size=2))
            held.update(zip(names[fresh:], full[fresh:], strict=True))
        seq += 1
        index.apply("w", EventBatch("life", seq, tuple(events)))
        assert len(known) == len(held)
    for prompt in [what for kind, what in steps if kind == "store"]:
        names = [repr(tuple(prompt[: end + 2])).encode() for end in range(0, len(prompt) - 1, 2)]
        expected = next((i for i, name in enumerate(names) if name not in held), len(names))
        assert index.lookup(block_digests(prompt, ROOT, 2)).get("w", 0) == expected


hashes = st.one_of(st.binary(min_size=1, max_size=32), st.integers(0, 2**63))
stored_events = st.builds(
    ForeignStored,
    st.lists(hashes, max_size=3).map(tuple),
    st.one_of(st.none(), hashes),
    st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
    st.integers(1, 64),
    st.sampled_from([None, "GPU", "CPU"]),
    st.sampled_from([None, "a"]),
    st.sampled_from([None, "s"]),
)
removed_events = st.builds(ForeignRemoved, st.lists(hashes, max_size=3).map(tuple), st.sampled_from([None, "GPU"]))


@given(st.lists(st.one_of(stored_events, removed_events, st.just(ForeignCleared()))))
def test_what_is_written_is_read_back(events):
    assert decode_batch(encode_batch(1.5, events)) == events


def test_arrays_of_older_versions_are_read():
    payload = msgspec.msgpack.encode(
        [1.0, [["BlockStored", [5, 6], None, [1, 2, 3, 4], 2, None], ["BlockRemoved", [5]], ["AllBlocksCleared"], ["Later", 1]]]
    )
    assert decode_batch(payload) == [
        ForeignStored((5, 6), None, (1, 2, 3, 4), 2),
        ForeignRemoved((5,)),
        ForeignCleared(),
    ]


@given(
    st.one_of(
        st.binary(max_size=64),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(-5, 2**40), st.text(max_size=12), st.sampled_from(["BlockStored"])),
            lambda inner: st.one_of(
                st.lists(inner, max_size=5),
                st.dictionaries(st.sampled_from(["type", "block_hashes", "token_ids", "block_size", "extra_keys"]), inner),
            ),
            max_leaves=20,
        ).map(msgspec.msgpack.encode),
    )
)
def test_garbage_is_a_value_error(payload):
    try:
        events = decode_batch(payload)
    except ValueError:
        return
    known = blocks()
    for event in events:
        known.apply(event)


@pytest.mark.parametrize(
    ("extra", "salt", "plain"),
    [
        (None, None, True),
        ([None, None], None, True),
        ([["s"], None], "s", True),
        ([["a", "s"], ["a"]], "s", True),
        ([["a"], ["a"]], None, True),
        ([[["image", 3]], None], None, False),
        ([None, ["late"]], None, False),
    ],
)
def test_extra_keys(extra, salt, plain):
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 1,
        "lora_name": "a" if extra and ["a"] in extra else None,
        "extra_keys": extra,
    }
    (read,) = decode_batch(msgspec.msgpack.encode([0.0, [event]]))
    assert (read.salt, read.plain) == (salt, plain)


def test_digests_of_a_removed_chain_are_those_that_were_stored():
    known = blocks(size=2)
    (added,) = known.apply(stored([1, 2, 3], range(6), size=2))
    (gone,) = known.apply(ForeignRemoved((3, 1)))
    assert split_digests(gone.digests) == [split_digests(added.digests)[2], split_digests(added.digests)[0]]
