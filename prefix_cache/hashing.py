"""Names of KV blocks: chained 128-bit digests that are equal on every process, machine and start.

A block is `block_size` consecutive tokens. Its digest is xxh3-128 over (parent digest, token ids as little-endian uint32).
The parent of a sequence's first block is a *root*: the namespace (all that makes keys and values interchangeable) with
the tenant's cache salt folded in. Two blocks have one digest only if everything before them, and the model that computed
them, is the same; so a lookup by digest can never find foreign KV.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import iter_unpack
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

DIGEST_BYTES = 16
TOKEN_BYTES = 4
DEFAULT_BLOCK_SIZE = 16

BlockHash = bytes
"""A digest of `DIGEST_BYTES` bytes."""

TokenIds = Sequence[int] | npt.NDArray[np.uint32]


def namespace_digest(fields: Mapping[str, str | int | float | bool | None]) -> BlockHash:
    """Fingerprint of everything that makes KV interchangeable: weights, dtypes, rope settings, block size, adapter.

    The order of `fields` does not matter. Returns `DIGEST_BYTES` bytes.
    """
    canonical = msgspec.json.encode(sorted(fields.items()))
    return xxhash.xxh3_128_digest(b"turnkeep-namespace-v1\x00" + canonical)


def root_digest(namespace: BlockHash, salt: str | None = None) -> BlockHash:
    """The parent of a first block. `salt` separates tenants that must not see each other's cached prefixes."""
    if salt is None or salt == "":
        return namespace
    return xxhash.xxh3_128_digest(b"salt\x00" + namespace + salt.encode("utf-8", "surrogatepass"))


def pack_tokens(token_ids: TokenIds | Iterable[int]) -> bytes:
    """Token ids as little-endian uint32, the form in which they are hashed and sent.

    Raises OverflowError for an id outside [0, 2**32).
    """
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype("<u4", copy=False).tobytes()
    try:
        values = array("I", token_ids)
    except OverflowError as error:
        raise OverflowError("token ids must lie in [0, 2**32)") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_tokens(packed: bytes) -> npt.NDArray[np.uint32]:
    """The inverse of `pack_tokens`, without copying. Raises ValueError when the length is no multiple of four."""
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"packed token ids take {TOKEN_BYTES} bytes each; {len(packed)} bytes are no whole number of ids")
    return np.frombuffer(packed, dtype="<u4")


def list_tokens(packed: bytes) -> list[int]:
    """The ids of `unpack_tokens`, as a list. Raises ValueError in the same case."""
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"packed token ids take {TOKEN_BYTES} bytes each; {len(packed)} bytes are no whole number of ids")
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def chain_digest(parent: BlockHash, packed_block: bytes | memoryview) -> BlockHash:
    """The digest of one full block whose predecessor has the digest `parent`."""
    return xxhash.xxh3_128_digest(parent + bytes(packed_block))


def iter_block_digests(packed: bytes, root: BlockHash, block_size: int = DEFAULT_BLOCK_SIZE) -> Iterator[BlockHash]:
    """Digests of the full blocks of a sequence, in order. A trailing partial block has no digest."""
    digest = xxhash.xxh3_128_digest
    step = block_size * TOKEN_BYTES
    parent = root
    for start in range(0, len(packed) - step + 1, step):
        parent = digest(parent + packed[start : start + step])
        yield parent


def joined_block_digests(packed: bytes, root: BlockHash, block_size: int = DEFAULT_BLOCK_SIZE) -> bytes:
    """As `iter_block_digests`, back to back."""
    digest = xxhash.xxh3_128_digest
    step = block_size * TOKEN_BYTES
    digests = []
    parent = root
    full = memoryview(packed)[: len(packed) // step * step]
    for (block,) in iter_unpack(f"{step}s", full):  # a fifth less than slicing
        parent = digest(parent + block)
        digests.append(parent)
    return b"".join(digests)


def block_digests(token_ids: TokenIds | bytes, root: BlockHash, block_size: int = DEFAULT_BLOCK_SIZE) -> list[BlockHash]:
    """Digests of the full blocks of `token_ids` (ids, or ids already packed)."""
    packed = token_ids if isinstance(token_ids, bytes) else pack_tokens(token_ids)
    return list(iter_block_digests(packed, root, block_size))


class JoinedDigests(Sequence[BlockHash]):
    """Digests back to back, read as a sequence: a prompt of 100k tokens has thousands, of which few are looked at."""

    __slots__ = ("joined",)

    def __init__(self, joined: bytes) -> None:
        """Raises ValueError when the length is no multiple of `DIGEST_BYTES`."""
        if len(joined) % DIGEST_BYTES:
            raise ValueError(f"digests take {DIGEST_BYTES} bytes each; {len(joined)} bytes are no whole number of digests")
        self.joined = joined

    def __len__(self) -> int:
        return len(self.joined) // DIGEST_BYTES

    @overload
    def __getitem__(self, at: int) -> BlockHash: ...

    @overload
    def __getitem__(self, at: slice) -> JoinedDigests: ...

    def __getitem__(self, at: int | slice) -> BlockHash | JoinedDigests:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                return JoinedDigests(b"".join(self[position] for position in range(start, stop, step)))
            return JoinedDigests(self.joined[start * DIGEST_BYTES : max(start, stop) * DIGEST_BYTES])
        return _one(self.joined, at)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(split_digests(self.joined))

    def where(self, chosen: npt.NDArray[np.bool_]) -> JoinedDigests:
        """Those that `chosen` [digests] names."""
        if chosen.all():
            return self
        rows = np.frombuffer(self.joined, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        return JoinedDigests(rows[chosen].tobytes())

    def __eq__(self, other: object) -> bool:
        return self.joined == other.joined if isinstance(other, JoinedDigests) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.joined)


def _one(joined: bytes | bytearray, at: int) -> BlockHash:
    """The digest at a position of a sequence."""
    count = len(joined) // DIGEST_BYTES
    if not -count <= at < count:
        raise IndexError(f"there are {count} digests, not one at {at}")
    start = (at + count if at < 0 else at) * DIGEST_BYTES
    return bytes(joined[start : start + DIGEST_BYTES])


class DigestChain(Sequence[BlockHash]):
    """Digests of one sequence's blocks, back to back, which grows at the end; read as a sequence."""

    __slots__ = ("_joined",)

    def __init__(self, joined: bytes | bytearray = b"") -> None:
        self._joined = bytearray(joined)

    def append(self, digest: BlockHash) -> None:
        """One more block."""
        self._joined += digest

    def copy(self) -> DigestChain:
        """Another one that begins with the same."""
        return DigestChain(self._joined)

    def frozen(self) -> JoinedDigests:
        """As it is now."""
        return JoinedDigests(bytes(self._joined))

    def __len__(self) -> int:
        return len(self._joined) // DIGEST_BYTES

    @overload
    def __getitem__(self, at: int) -> BlockHash: ...

    @overload
    def __getitem__(self, at: slice) -> JoinedDigests: ...

    def __getitem__(self, at: int | slice) -> BlockHash | JoinedDigests:
        if not isinstance(at, slice):
            return _one(self._joined, at)
        start, stop, step = at.indices(len(self))
        if step != 1:
            return self.frozen()[at]
        return JoinedDigests(bytes(memoryview(self._joined)[start * DIGEST_BYTES : max(start, stop) * DIGEST_BYTES]))

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(split_digests(bytes(self._joined)))

    def __eq__(self, other: object) -> bool:
        return self._joined == other._joined if isinstance(other, DigestChain) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes


def as_joined(digests: Sequence[BlockHash]) -> JoinedDigests:
    """The same digests back to back."""
    if isinstance(digests, JoinedDigests):
        return digests
    if isinstance(digests, DigestChain):
        return digests.frozen()
    return JoinedDigests(b"".join(digests))


def join_digests(digests: Iterable[BlockHash]) -> bytes:
    """Digests back to back, the form in which events carry them."""
    return b"".join(digests)


_DIGEST = f"{DIGEST_BYTES}s"


def split_digests(joined: bytes) -> list[BlockHash]:
    """The inverse of `join_digests`. Raises ValueError when the length is no multiple of `DIGEST_BYTES`."""
    if len(joined) % DIGEST_BYTES:
        raise ValueError(f"digests take {DIGEST_BYTES} bytes each; {len(joined)} bytes are no whole number of digests")
    return [digest for (digest,) in iter_unpack(_DIGEST, joined)]
