"""Block digests are chained, deterministic across processes, and differ when anything before them differs."""

import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.hashing import (
    DIGEST_BYTES,
    DigestChain,
    JoinedDigests,
    as_joined,
    block_digests,
    chain_digest,
    join_digests,
    namespace_digest,
    pack_tokens,
    root_digest,
    split_digests,
    unpack_tokens,
)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)
NAMESPACE = namespace_digest({"weights": "w", "block_size": 4})


@given(tokens)
def test_packing_round_trips(ids):
    packed = pack_tokens(ids)
    assert unpack_tokens(packed).tolist() == ids
    assert pack_tokens(np.array(ids, dtype=np.uint32)) == packed


@pytest.mark.parametrize("ids", [[-1], [2**32], [0, 5, -7]])
def test_ids_out_of_range_are_refused(ids):
    with pytest.raises(OverflowError):
        pack_tokens(ids)


def test_packed_bytes_of_no_whole_id_are_refused():
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_tokens(b"12345")


@given(tokens, st.integers(1, 9))
def test_digests_cover_full_blocks_only_and_chain(ids, block_size):
    digests = block_digests(ids, NAMESPACE, block_size)
    assert len(digests) == len(ids) // block_size
    parent = NAMESPACE
    for i, digest in enumerate(digests):
        parent = chain_digest(parent, pack_tokens(ids[i * block_size : (i + 1) * block_size]))
        assert digest == parent
        assert len(digest) == DIGEST_BYTES


@given(st.lists(st.integers(0, 9), min_size=16, max_size=16), st.integers(0, 15))
def test_a_change_changes_its_block_and_every_later_one(ids, position):
    changed = ids.copy()
    changed[position] += 1
    before, after = block_digests(ids, NAMESPACE, 4), block_digests(changed, NAMESPACE, 4)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [i < position // 4 for i in range(4)]


def test_the_same_tokens_under_another_root_have_other_digests():
    ids = list(range(8))
    roots = [
        NAMESPACE,
        root_digest(NAMESPACE, "tenant-a"),
        root_digest(NAMESPACE, "tenant-b"),
        namespace_digest({"weights": "w", "block_size": 8}),
        namespace_digest({"weights": "v", "block_size": 4}),
    ]
    firsts = {block_digests(ids, root, 4)[0] for root in roots}
    assert len(firsts) == len(roots)
    assert root_digest(NAMESPACE, None) == root_digest(NAMESPACE, "") == NAMESPACE


def test_field_order_does_not_matter_and_types_do():
    assert namespace_digest({"a": 1, "b": "x"}) == namespace_digest({"b": "x", "a": 1})
    assert namespace_digest({"a": 1}) != namespace_digest({"a": "1"})
    assert namespace_digest({"a": None}) != namespace_digest({})


def test_joined_digests_split_again():
    digests = block_digests(list(range(12)), NAMESPACE, 4)
    assert split_digests(join_digests(digests)) == digests
    with pytest.raises(ValueError, match="17 bytes"):
        split_digests(bytes(17))


def test_digests_are_the_same_in_another_process_with_another_hash_seed():
    code = (
        "from prefix_cache.hashing import *;"
        "print(block_digests(range(32), root_digest(namespace_digest({'m': 'x', 'b': 16}), 's'), 16)[-1].hex())"
    )
    out = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = block_digests(range(32), root_digest(namespace_digest({"m": "x", "b": 16}), "s"), 16)[-1].hex()
    assert out == {here}


def test_a_digest_is_plain_xxh3_over_parent_and_little_endian_ids():
    expected = xxhash.xxh3_128_digest(NAMESPACE + b"\x01\x00\x00\x00\x02\x00\x00\x00")
    assert block_digests([1, 2], NAMESPACE, 2) == [expected]


def test_a_chain_grows_and_reads_as_a_sequence():
    digests = [bytes([number] * 16) for number in range(5)]
    chain = DigestChain()
    before = chain.frozen()
    for digest in digests:
        chain.append(digest)
    assert len(before) == 0
    assert list(chain) == digests
    assert [chain[0], chain[4], chain[-1]] == [digests[0], digests[4], digests[4]]
    assert isinstance(chain[1:3], JoinedDigests)
    chosen = [False, True, True, False, True]
    assert list(chain.frozen().where(np.array(chosen))) == [
        digest for digest, is_in in zip(digests, chosen, strict=True) if is_in
    ]
    assert chain.frozen().where(np.ones(5, dtype=bool)) == chain.frozen()
    assert len(chain.frozen().where(np.zeros(5, dtype=bool))) == 0
    assert [list(chain[1:3]), list(chain[3:]), list(chain[9:]), list(chain[::2])] == [
        digests[1:3],
        digests[3:],
        [],
        digests[::2],
    ]
    other = chain.copy()
    assert other == chain
    other.append(bytes(16))
    assert (len(chain), len(other)) == (5, 6)
    assert other != chain
    assert as_joined(chain) == as_joined(digests) == JoinedDigests(b"".join(digests))
    for outside in (5, -6):
        with pytest.raises(IndexError, match="there are 5 digests"):
            chain[outside]
