"""Records as bytes: whatever goes in comes out, and whatever is not a record is refused."""

import struct

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_cache.hashing import pack_tokens, unpack_tokens
from prefix_cache.packed_tokens import PackedTokens
from sessions.codec import FORMAT, CodecError, decode_record, encode_record, narrow, widen
from sessions.digests import NO_MEANING
from sessions.ledger import Generated, Ledger, Span, extend_blocks, pack_spans
from sessions.records import SessionRecord
from tests.sessions.ledgers import a_large_ledger, a_ledger, a_record

digest = st.binary(min_size=16, max_size=16)
ids = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 255) | st.integers(0, 70_000), max_size=40)
# What the parser lets through: header bytes come with lone surrogates replaced, keys are printable.
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
seconds = st.floats(0, 1e12)


@st.composite
def ledgers(draw):
    tokens = PackedTokens(pack_tokens(draw(ids)))
    count = draw(st.integers(0, 4))
    ends = [sorted(draw(st.lists(st.integers(0, top), min_size=count, max_size=count))) for top in (6, len(tokens), 10**9)]
    spans = [Span(*end, draw(st.integers(0, 2**64 - 1)), draw(digest | st.just(NO_MEANING))) for end in zip(*ends, strict=True)]
    root, block_size = draw(digest), draw(st.integers(1, 16))
    pending = draw(st.lists(st.builds(Generated, digest, ids.map(pack_tokens), st.booleans(), st.booleans()), max_size=2))
    return Ledger(
        context=draw(digest),
        root=root,
        block_size=block_size,
        messages=b"".join(draw(st.lists(digest, min_size=6, max_size=8))),
        spans=pack_spans(spans),
        tokens=tokens,
        blocks=extend_blocks(b"", tokens, root, block_size),
        tail=draw(texts),
        pending=tuple(pending),
        generated_tokens=draw(st.integers(0, 10**6)),
        reasoned=draw(st.booleans()),
        worker=draw(texts),
        used_at=draw(seconds),
    )


records = st.builds(
    SessionRecord,
    tenant=texts,
    key=texts,
    model=texts,
    version=st.integers(1, 2**53),
    named=st.booleans(),
    source=st.none() | texts,
    parent=st.none() | texts,
    created_at=seconds,
    used_at=seconds,
    branches=st.lists(ledgers(), max_size=3).map(tuple),
    turns=st.integers(0, 10**9),
    prefill_seconds=seconds,
)


@settings(deadline=None)
@given(records)
def test_a_record_comes_back_as_it_was(record):
    assert decode_record(encode_record(record)) == record


@given(ids)
def test_ids_take_as_few_bytes_as_they_need(values):
    packed = pack_tokens(values)
    narrowed = narrow(packed)
    assert unpack_tokens(widen(narrowed)).tolist() == values
    width = max(1, (max(values).bit_length() + 7) // 8) if values else 0
    assert len(narrowed) == (1 + width * len(values) if values else 0)


@settings(deadline=None)
@given(records, st.data())
def test_bytes_that_were_changed_anywhere_are_no_record(record, data):
    good = bytearray(encode_record(record))
    change = data.draw(st.sampled_from(["flip", "cut", "grow", "format"]))
    if change == "flip":
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] ^= 1 << data.draw(st.integers(0, 7))
    elif change == "cut":
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    elif change == "grow":
        good += b"\x00"
    else:
        good[3] = data.draw(st.integers(0, 255).filter(lambda number: number != FORMAT))
    with pytest.raises(CodecError):
        decode_record(bytes(good))


@given(st.binary(max_size=200))
def test_anything_else_is_no_record(data):
    with pytest.raises(CodecError):
        decode_record(data)


def sealed(payload):
    """Whole, with a right checksum, and wrong all the same."""
    return struct.pack("<3sBQ", b"TKS", FORMAT, xxhash.xxh3_64_intdigest(payload)) + payload


@pytest.mark.parametrize(
    "changes",
    [
        {"context": b"short"},
        {"root": b""},
        {"block_size": 0},
        {"block_size": 10**6},
        {"messages": b"x" * 17},
        {"spans": b"x" * 39},
        {"spans": pack_spans([Span(2, 2, 2, 0), Span(1, 3, 3, 0)])},
        {"spans": pack_spans([Span(1, 10**6, 2, 0)])},
        {"spans": pack_spans([Span(9, 1, 2, 0)])},
        {"tokens": b"\x05abcde"},
        {"tokens": b"\x02abc"},
        {"pending": (Generated(b"m" * 16, b"\x00x"),)},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(changes):
    ledger = msgspec.structs.replace(a_ledger(["a", "b"]), blocks=b"")
    ledger = msgspec.structs.replace(ledger, tokens=narrow(ledger.tokens.whole()))
    good = a_record("s", ledger)
    assert decode_record(sealed(msgspec.msgpack.encode(good))).key == "s"
    bad = msgspec.structs.replace(good, branches=(msgspec.structs.replace(ledger, **changes),))
    with pytest.raises(CodecError, match="cannot be read"):
        decode_record(sealed(msgspec.msgpack.encode(bad)))


def test_fields_come_and_go_within_a_format():
    good = msgspec.msgpack.decode(encode_record(a_record("s", version=7))[12:])
    good["a field of later"] = 1
    del good["turns"]
    record = decode_record(sealed(msgspec.msgpack.encode(good)))
    assert (record.key, record.version, record.turns) == ("s", 7, 0)
    for wrong in ({**good, "version": "7"}, {"tenant": "t"}, [1, 2], None):
        with pytest.raises(CodecError):
            decode_record(sealed(msgspec.msgpack.encode(wrong)))


def test_a_long_conversation_takes_little_more_than_two_bytes_a_token():
    ledger = a_large_ledger(100_000, 200)
    small = PackedTokens(pack_tokens(unpack_tokens(ledger.tokens.whole()) % 49_152))
    blocks = extend_blocks(b"", small, ledger.root, ledger.block_size)
    record = a_record("s", msgspec.structs.replace(ledger, tokens=small, blocks=blocks))
    data = encode_record(record)
    assert len(data) < 2.2 * 100_000
    assert decode_record(data) == record
