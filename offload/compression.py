"""zstd around a tier: what it keeps is shorter, what it gives back is what it was given.

Keys and values of a trained model have little redundancy beyond their exponents, which lie in every second byte: bytes are
sorted by their place in the element first, as HDF5's shuffle filter does.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from offload.checksum import Bytes
from offload.errors import TierMisconfigured
from offload.tier import Outgoing, Tier, TierFigures
from prefix_cache.hashing import BlockHash

_PLAIN, _ZSTD = 0, 1
OVERHEAD = 1
"""Bytes by which a block that does not compress grows."""


class VariableTier(Tier, Protocol):
    """A tier whose blocks may be shorter than the longest."""

    def load_any(self, digest: BlockHash, into: Bytes) -> int:
        """Like `load`, of a block that may be shorter than `into`; its length, 0 when it is not to be had."""


class CompressedTier:
    """A `Tier` that keeps blocks of `block_bytes` in another one, compressed. `element_bytes`: how bytes are sorted."""

    def __init__(self, inner: VariableTier, block_bytes: int, element_bytes: int, level: int = 1) -> None:
        """Raises TierMisconfigured when the library is not installed."""
        try:
            self._zstd: Any = importlib.import_module("zstandard")
        except ImportError as error:
            message = "Compression needs the package zstandard: pip install 'turnkeep[zstd]', or leave it off."
            raise TierMisconfigured(message) from error
        self.name = inner.name
        self._inner = inner
        self._block_bytes = block_bytes
        self._element_bytes = element_bytes
        self._level = level
        self._local = threading.local()

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        return self._inner.prefix(digests)

    def lacking(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return self._inner.lacking(digests)

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        buffer = self._buffer()
        length = self._inner.load_any(digest, buffer)
        if length < OVERHEAD:
            return False
        body = buffer[OVERHEAD:length]
        if buffer[0] == _PLAIN:
            if len(body) != len(into):
                return False
            np.copyto(into, body)
            return True
        try:
            plain = self._zstd.ZstdDecompressor().decompress(body.data, max_output_size=len(into))
        except self._zstd.ZstdError:
            return False
        if len(plain) != len(into):
            return False
        shuffled = np.frombuffer(plain, dtype=np.uint8).reshape(self._element_bytes, -1)
        np.copyto(into.reshape(-1, self._element_bytes), shuffled.T)
        return True

    def ahead(self, digests: Sequence[BlockHash]) -> None:
        self._inner.ahead(digests)

    def store(self, blocks: Sequence[Outgoing]) -> list[BlockHash]:
        return self._inner.store([block._replace(payload=self._compress(block.payload)) for block in blocks])

    def evict(self, digests: Iterable[BlockHash]) -> int:
        return self._inner.evict(digests)

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        return self._inner.mark(digests, standing, expected=expected, session=session)

    def figures(self) -> TierFigures:
        return self._inner.figures()

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    def close(self) -> None:
        self._inner.close()

    def _compress(self, payload: Bytes) -> Bytes:
        shuffled = np.ascontiguousarray(payload.reshape(-1, self._element_bytes).T)
        packed = self._zstd.ZstdCompressor(level=self._level).compress(shuffled.data)
        if len(packed) < len(payload):
            return np.frombuffer(bytes((_ZSTD,)) + packed, dtype=np.uint8)
        return np.concatenate((np.array([_PLAIN], dtype=np.uint8), payload))

    def _buffer(self) -> Bytes:
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = np.empty(self._block_bytes + OVERHEAD, dtype=np.uint8)
        return buffer
