"""The checksum that every stored block carries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from prefix_cache.hashing import BlockHash

Bytes = npt.NDArray[np.uint8]
"""A run of bytes, uint8 [n], contiguous."""


def as_buffer(payload: Bytes | bytes) -> memoryview | bytes:
    """The same bytes as what system calls take."""
    return payload if isinstance(payload, bytes) else payload.data


def key_salt(key: BlockHash) -> int:
    """What a kind of block (namespace and codec) adds to its checksums."""
    return _fold(key)


def payload_checksum(payload: Bytes | bytes, digest: BlockHash, salt: int) -> int:
    """64 bits over the bytes, seeded with the block's name and kind: another block's bytes, or the same block's in another
    codec, whole as they are, do not pass for it."""
    return xxhash.xxh3_64_intdigest(as_buffer(payload), seed=_fold(digest) ^ salt)


def _fold(digest: BlockHash) -> int:
    return int.from_bytes(digest[:8], "little") ^ int.from_bytes(digest[8:16], "little")
