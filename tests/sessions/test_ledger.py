"""The ledger's columns: where spans end, what a cut keeps, what two conversations share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.hashing import block_digests, pack_tokens
from prefix_cache.packed_tokens import NO_TOKENS, PackedTokens
from sessions.digests import NO_MEANING, meaning_digest, message_digests, prefix_name, prefix_names, split_reasoning
from sessions.ledger import Span, common_blocks, common_messages, extend_blocks
from tests.sessions.ledgers import ROOT, a_large_ledger, a_ledger


def test_spans_are_read_back_as_they_were_packed() -> None:
    ledger = a_ledger(["a", "bc", "def"], generated=(1,))
    assert [span.messages for span in ledger.iter_spans()] == [1, 2, 3]
    assert [span.text_bytes for span in ledger.iter_spans()] == [1, 3, 6]
    assert ledger.span(-1) == ledger.span(2) == list(ledger.iter_spans())[2]
    assert ledger.span(1).generated
    assert not ledger.span(0).generated
    assert ledger.span(0).meaning == NO_MEANING
    with pytest.raises(IndexError, match="3 spans"):
        ledger.span(3)


def test_a_cut_keeps_what_lies_before_it() -> None:
    ledger = a_ledger(["a", "bc", "def", "g"], generated=(1, 3))
    part = ledger.cut(2)
    assert part.num_messages == 2
    assert part.num_tokens == 6
    assert part.tokens.whole() == ledger.tokens.whole()[:24]
    assert part.blocks == ledger.blocks[:16]  # one full block of four in six tokens
    assert part.generated_tokens == 3
    assert part.end_of(2) == Span(2, 6, 3, ledger.span(1).text_hash, ledger.span(1).meaning)
    assert ledger.cut(0).tokens == NO_TOKENS
    assert ledger.cut(0).end_of(0) == (0, 0, 0, 0, NO_MEANING)


@given(ends=st.lists(st.integers(1, 3), max_size=12), asked=st.integers(0, 40))
def test_spans_within_counts_those_that_end_in_time(ends: list[int], asked: int) -> None:
    from sessions.ledger import Ledger, pack_spans

    total, spans = 0, []
    for step in ends:
        total += step
        spans.append(Span(total, total, total, 0))
    ledger = Ledger(context=b"", root=ROOT, block_size=4, spans=pack_spans(spans))
    assert ledger.spans_within(asked) == sum(span.messages <= asked for span in spans)


@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9))
def test_common_messages_and_blocks_are_the_shared_prefix(left: list[int], right: list[int]) -> None:
    def joined(values: list[int]) -> bytes:
        return message_digests([{"role": "user", "content": str(value)} for value in values])

    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    assert common_messages(joined(left), joined(right)) == shared
    one, two = (b"".join(block_digests(pack_tokens(values), ROOT, 1)) for values in (left, right))
    assert common_blocks(one, two) == shared


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40), st.integers(1, 5))
def test_extended_blocks_are_those_of_the_whole(ids: list[int], known: int, block_size: int) -> None:
    first = extend_blocks(b"", PackedTokens(pack_tokens(ids[:known])), ROOT, block_size)
    assert extend_blocks(first, PackedTokens(pack_tokens(ids)), ROOT, block_size) == b"".join(
        block_digests(pack_tokens(ids), ROOT, block_size)
    )


def test_a_ledger_takes_less_than_eight_bytes_a_token() -> None:
    ledger = a_large_ledger(100_000, 200)
    assert ledger.nbytes / ledger.num_tokens < 5.2


def _assistant(content: str, *calls: tuple[str, object]) -> dict[str, object]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": f"{at}", "function": {"name": n, "arguments": a}} for at, (n, a) in enumerate(calls)],
    }


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (_assistant("a \n"), _assistant("a"), True),
        (_assistant("<think>\nhm\n</think>\n\na"), _assistant("a"), True),
        (_assistant("hm</think>a"), _assistant("a"), True),
        (_assistant("a"), _assistant("b"), False),
        (_assistant("", ("f", {"x": 1, "y": [2.0]})), _assistant("", ("f", {"y": [2], "x": 1.0})), True),
        (_assistant("", ("f", {"x": [1, 2]})), _assistant("", ("f", {"x": [2, 1]})), False),
        (_assistant("", ("f", {"x": "1"})), _assistant("", ("f", {"x": 1})), False),
        (_assistant("", ("f", {"x": True})), _assistant("", ("f", {"x": 1})), False),
        (_assistant("", ("f", {"x": 2**70})), _assistant("", ("f", {"x": 2**70})), True),
        (_assistant("", ("f", {})), _assistant("", ("g", {})), False),
        (_assistant("", ("f", {}), ("g", {})), _assistant("", ("g", {}), ("f", {})), False),
    ],
)
def test_meaning_is_what_was_said(left: dict[str, object], right: dict[str, object], same: bool) -> None:
    assert (meaning_digest(left) == meaning_digest(right)) is same


def test_reasoning_is_split_where_it_ends() -> None:
    assert split_reasoning("<think>a</think>\n\nb") == ("<think>a</think>\n\n", "b")
    assert split_reasoning("a</think>b") == ("a</think>", "b")
    assert split_reasoning("see <think> and </think>") == ("", "see <think> and </think>")
    assert split_reasoning("plain") == ("", "plain")


def test_prefix_names_depend_on_all_before_them_and_on_the_scope() -> None:
    ab = message_digests([{"content": "a"}, {"content": "b"}])
    cb = message_digests([{"content": "c"}, {"content": "b"}])
    assert prefix_name(ab, b"x") == prefix_names(ab, b"x")[1]
    assert prefix_names(ab)[0] == prefix_names(ab[:16])[0]
    assert prefix_names(ab)[1] != prefix_names(cb)[1]
    assert prefix_names(ab, b"x")[0] != prefix_names(ab, b"y")[0]
