"""Blocks that can be told from all others: their bytes follow from their number."""

from __future__ import annotations

import numpy as np
import xxhash

from offload.checksum import Bytes
from offload.tier import Outgoing


def digest_of(number: int) -> bytes:
    return xxhash.xxh3_128_digest(b"block %d" % number)


def payload_of(number: int, size: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def outgoing(number: int, size: int, depth: int = 0, session: int = 0) -> Outgoing:
    return Outgoing(digest_of(number), payload_of(number, size), depth, session)
