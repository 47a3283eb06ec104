"""Token ids in shared parts are the same ids, whatever was done to get them."""

from __future__ import annotations

import os

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_cache import packed_tokens
from prefix_cache.packed_tokens import NO_TOKENS, PART_BYTES, PackedTokens

PART = PART_BYTES // 4


def some(count: int, seed: int = 0) -> bytes:
    return b"".join((seed * 10**6 + at).to_bytes(4, "little") for at in range(count))


ids = st.integers(0, 30).flatmap(lambda count: st.binary(min_size=4 * count, max_size=4 * count))
steps = st.tuples(st.integers(0, 40), st.lists(ids, max_size=3))


@settings(max_examples=300, deadline=None)
@given(
    first=st.integers(0, 30),
    plan=st.lists(st.tuples(steps, st.integers(0, 9)), max_size=8),
    asked=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120) | st.none()), max_size=6),
)
def test_with_small_parts_it_is_what_plain_bytes_are(
    first: int, plan: list[tuple[tuple[int, list[bytes]], int]], asked: list[tuple[int, int | None]]
) -> None:
    """Parts of four ids: many prompts that go on from each other, in the order of a session or not."""
    before = packed_tokens.PART_BYTES
    packed_tokens.PART_BYTES = 16
    try:
        prompts = [(PackedTokens(some(first)), some(first))]
        for (kept, ids), base in plan:
            tokens, plain = prompts[base % len(prompts)]
            prompts.append((tokens.extended(kept, ids), plain[: 4 * kept] + b"".join(ids)))
            for start, _ in asked[:2]:
                tokens.digest(start)  # leaves states behind that the next ones take over
        for tokens, plain in prompts:
            assert (tokens.whole(), len(tokens), tokens.nbytes) == (plain, len(plain) // 4, len(plain))
            assert all(len(part) == 16 for part in tokens.parts[:-1])
            assert all(tokens.parts)
            for start, end in asked:
                assert tokens.part(start, end) == plain[4 * start : None if end is None else 4 * end]
                assert tokens.digest(start) == xxhash.xxh3_128_digest(plain[: 4 * start])
            assert tokens == PackedTokens(plain)
            assert hash(tokens) == hash(PackedTokens(plain))
        for tokens, plain in prompts:
            for other, theirs in prompts:
                same = 0
                while same < min(len(tokens), len(other)) and tokens.part(same, same + 1) == other.part(same, same + 1):
                    same += 1
                assert tokens.common(other) == same
                assert tokens.starts_with(other) == plain.startswith(theirs)
                assert (tokens == other) == (plain == theirs)
    finally:
        packed_tokens.PART_BYTES = before


def test_a_prompt_that_goes_on_copies_and_hashes_no_more_than_a_part() -> None:
    """Of a conversation of 100k tokens, turn after turn."""
    tokens = PackedTokens(some(100_000))
    assert tokens.digest(100_000) == xxhash.xxh3_128_digest(some(100_000))
    for turn in range(1, 30):
        grown = tokens.extended(len(tokens) - 3, (some(700, turn), some(300, -turn % 7)))
        shared = sum(mine is theirs for mine, theirs in zip(grown.parts, tokens.parts, strict=False))
        assert sum(len(part) for part in grown.parts[shared:]) <= PART_BYTES + 4000
        # What is hashed is behind the last state that was taken over.
        assert len(grown.parts) - len(grown._states) <= 2
        states = grown._states
        assert grown.digest(len(grown)) == xxhash.xxh3_128_digest(grown.whole())
        assert grown._states[: len(states)] == states
        assert grown.common(tokens) == len(tokens) - 3
        tokens = grown


def test_of_parts_only_those_at_the_ends_are_cut() -> None:
    tokens = PackedTokens(some(3 * PART + 5))
    assert tokens.part(PART, 2 * PART) is not None
    assert tokens.extended(2 * PART, ()).parts[1] is tokens.parts[1]
    assert tokens.extended(len(tokens), ()) == tokens
    assert tokens.extended(10**9, (some(1),)).whole() == some(3 * PART + 5) + some(1)
    assert len(PackedTokens(some(2 * PART)).parts) == 2


def test_half_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes"):
        PackedTokens(b"1234567")
    with pytest.raises(ValueError, match="6 bytes"):
        PackedTokens(b"1234").extended(1, (b"ab",))


def test_none_at_all() -> None:
    assert (len(NO_TOKENS), NO_TOKENS.whole(), NO_TOKENS.part(0), NO_TOKENS.parts) == (0, b"", b"", ())
    assert NO_TOKENS.digest(0) == xxhash.xxh3_128_digest(b"")
    assert PackedTokens(os.urandom(8)).starts_with(NO_TOKENS)
    assert NO_TOKENS != b""


def test_what_it_takes_in_memory_is_counted() -> None:
    tokens = PackedTokens(some(100_000))
    assert tokens.held_bytes / len(tokens) < 4.05
    tokens.digest(100_000)
    assert 4.05 < tokens.held_bytes / len(tokens) < 4.2
