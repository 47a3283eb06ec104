"""A session record as bytes, for stores outside of this process.

    "TKS" | format (1 byte) | xxh3-64 of the rest (8 bytes, little-endian) | MessagePack of the SessionRecord

Token ids are narrowed to the fewest bytes an id that hold them all (1 to 4, said by the first byte of the column), and block
hashes are left out: they follow from the ids. What is read back is checked before it is believed; fields that this version
does not know are ignored, fields that are absent have their defaults, and a change that this does not cover gets a new
format number.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import xxhash

from prefix_cache.hashing import DIGEST_BYTES as BLOCK_BYTES
from prefix_cache.hashing import TOKEN_BYTES, pack_tokens, unpack_tokens
from prefix_cache.packed_tokens import PackedTokens
from sessions.digests import DIGEST_BYTES
from sessions.ledger import SPAN_BYTES, Ledger, extend_blocks
from sessions.records import SessionRecord

FORMAT = 1
MAX_BLOCK_SIZE = 4096

_MAGIC = b"TKS"
_HEAD = struct.Struct("<3sBQ")


class CodecError(Exception):
    """Bytes that are no record: cut, changed, of another format, or of something else. The message says which."""


def _written(value: object) -> bytes:
    if isinstance(value, PackedTokens):
        return narrow(value.whole())
    raise TypeError(f"{type(value).__name__} has no place in a session record")


def _read(kind: type, value: object) -> PackedTokens:
    if kind is not PackedTokens or not isinstance(value, bytes):
        raise ValueError(f"{type(value).__name__} where {kind.__name__} was expected")
    return PackedTokens(widen(value))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_written)
_DECODER = msgspec.msgpack.Decoder(SessionRecord, dec_hook=_read)


def encode_record(record: SessionRecord) -> bytes:
    """The bytes of a record."""
    branches = tuple(
        msgspec.structs.replace(
            ledger,
            blocks=b"",
            pending=tuple(msgspec.structs.replace(item, token_ids=narrow(item.token_ids)) for item in ledger.pending),
        )
        for ledger in record.branches
    )
    payload = _ENCODER.encode(msgspec.structs.replace(record, branches=branches))
    return _HEAD.pack(_MAGIC, FORMAT, xxhash.xxh3_64_intdigest(payload)) + payload


def decode_record(data: bytes) -> SessionRecord:
    """The record of these bytes. Raises CodecError."""
    if len(data) < _HEAD.size:
        raise CodecError(f"{len(data)} bytes are too few for a session")
    magic, number, digest = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CodecError("it is no session")
    if number != FORMAT:
        raise CodecError(f"it has format {number}, and this version reads format {FORMAT}")
    payload = memoryview(data)[_HEAD.size :]
    if xxhash.xxh3_64_intdigest(payload) != digest:
        raise CodecError("its checksum is not that of its contents")
    try:
        record = _DECODER.decode(payload)
        return msgspec.structs.replace(record, branches=tuple(_restored(ledger) for ledger in record.branches))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, struct.error) as error:
        raise CodecError(f"it cannot be read: {error}") from error


def _restored(ledger: Ledger) -> Ledger:
    """With wide ids of its answers, and block hashes again. Raises ValueError for columns that do not fit together."""
    if len(ledger.context) != DIGEST_BYTES or len(ledger.root) != BLOCK_BYTES:
        raise ValueError("a ledger's context or root is no digest")
    if not 1 <= ledger.block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"blocks of {ledger.block_size} tokens")
    if len(ledger.messages) % DIGEST_BYTES or len(ledger.spans) % SPAN_BYTES:
        raise ValueError("a ledger's columns are cut in the middle")
    before = (0, 0, 0)
    for span in ledger.iter_spans():
        ends = (span.messages, span.tokens, span.text_bytes)
        if any(end < start for end, start in zip(ends, before, strict=True)):
            raise ValueError("the spans of a ledger are out of order")
        before = ends
    if before[0] > ledger.num_messages or before[1] > len(ledger.tokens):
        raise ValueError("the spans of a ledger end behind its end")
    pending = tuple(msgspec.structs.replace(item, token_ids=widen(item.token_ids)) for item in ledger.pending)
    blocks = extend_blocks(b"", ledger.tokens, ledger.root, ledger.block_size)
    return msgspec.structs.replace(ledger, blocks=blocks, pending=pending)


def narrow(packed: bytes) -> bytes:
    """Packed token ids (four bytes each) in as few bytes as the largest needs, the number of them first."""
    ids = unpack_tokens(packed)
    if not ids.size:
        return b""
    width = max(1, (int(ids.max()).bit_length() + 7) // 8)
    return bytes((width,)) + ids.view(np.uint8).reshape(-1, TOKEN_BYTES)[:, :width].tobytes()


def widen(narrowed: bytes) -> bytes:
    """The inverse of `narrow`. Raises ValueError."""
    if not narrowed:
        return b""
    width = narrowed[0]
    if not 1 <= width <= TOKEN_BYTES or (len(narrowed) - 1) % width:
        raise ValueError("a column of token ids is cut in the middle")
    ids = np.zeros(((len(narrowed) - 1) // width, TOKEN_BYTES), dtype=np.uint8)
    ids[:, :width] = np.frombuffer(narrowed, dtype=np.uint8, offset=1).reshape(-1, width)
    return pack_tokens(ids.reshape(-1).view("<u4"))
