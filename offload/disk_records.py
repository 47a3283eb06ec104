"""The index of the disk tier on disk: one record of 64 bytes for each slot, each with a checksum of its own.

A record says which block lies in its slot. It is a hint that survives: whatever it says, the block is verified when it is read.
So neither order nor completeness of the writes matters after a loss of power.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import xxhash

from prefix_cache.hashing import BlockHash

RECORD_BYTES = 64
_RECORD = struct.Struct("<16sQIId16x")  # digest, checksum, length, depth, wall time
_SUM = struct.Struct("<Q")
EMPTY = bytes(RECORD_BYTES)


def pack_record(slot: int, digest: BlockHash, checksum: int, length: int, depth: int, wall_time: float) -> bytes:
    """64 bytes: the block `digest` of `length` bytes with `checksum` lies in `slot`, last used at `wall_time`
    (seconds since 1970)."""
    body = _RECORD.pack(digest, checksum, length, depth, wall_time)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body, seed=slot))


def read_records(content: bytes) -> Iterator[tuple[int, BlockHash, int, int, int, float]]:
    """(slot, digest, checksum, length, depth, wall time) of each record that is whole; others are passed over."""
    for slot in range(len(content) // RECORD_BYTES):
        start = slot * RECORD_BYTES
        record = content[start : start + RECORD_BYTES]
        if record == EMPTY:
            continue
        body = record[:-8]
        if _SUM.unpack(record[-8:])[0] == xxhash.xxh3_64_intdigest(body, seed=slot):
            digest, checksum, length, depth, wall_time = _RECORD.unpack(body)
            yield slot, digest, checksum, length, depth, wall_time
