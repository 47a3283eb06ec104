"""The digests of prompts that sessions sent last: a session's next prompt goes on from there, so only its end is hashed anew.

Hashing block by block takes thousands of calls for a long context, and holds up the other threads of the interpreter. That a
prompt begins with what was hashed is seen by a hash over all of it at once, of the same kind and width as the digests, so this
says two prompts are the same in no case where they would not have the same digests anyhow.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from prefix_cache.hashing import TOKEN_BYTES, BlockHash, JoinedDigests, joined_block_digests

_LEAST_BLOCKS = 32
_OVERHEAD = 512
"""Bytes that an entry takes beside its digests, about."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The first `length` bytes of a packed prompt, whole blocks, which hash to `check`."""

    root: BlockHash
    length: int
    check: bytes
    digests: JoinedDigests


class ChainMemory:
    """At most `max_bytes` of digests; those of sessions that were here longest ago are forgotten first. Thread-safe."""

    def __init__(self, block_size: int, max_bytes: int = 32 << 20) -> None:
        self._step = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._max_bytes = max_bytes
        self._bytes = 0
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._prompts)

    def digests(self, packed: bytes, root: BlockHash, session: int) -> JoinedDigests:
        """Of the full blocks of a prompt whose first block has the parent `root`. `session`: 0 for none."""
        blocks = len(packed) // self._step
        if not session or blocks < _LEAST_BLOCKS:
            return JoinedDigests(joined_block_digests(packed, root, self._block_size))
        with self._lock:
            before = self._prompts.get(session)
        view = memoryview(packed)
        length = blocks * self._step
        if before is not None and before.root == root and before.length <= length:
            seen = xxhash.xxh3_128(view[: before.length])
            if seen.digest() == before.check:
                seen.update(view[before.length : length])
                new = joined_block_digests(packed[before.length :], before.digests[-1], self._block_size)
                return self._remember(session, _Prompt(root, length, seen.digest(), JoinedDigests(before.digests.joined + new)))
        digests = JoinedDigests(joined_block_digests(packed, root, self._block_size))
        return self._remember(session, _Prompt(root, length, xxhash.xxh3_128_digest(view[:length]), digests))

    def _remember(self, session: int, prompt: _Prompt) -> JoinedDigests:
        with self._lock:
            known = self._prompts.pop(session, None)
            if known is not None:
                self._bytes -= _size(known)
            self._prompts[session] = prompt
            self._bytes += _size(prompt)
            while self._bytes > self._max_bytes:
                self._bytes -= _size(self._prompts.popitem(last=False)[1])
        return prompt.digests


def _size(prompt: _Prompt) -> int:
    return len(prompt.digests.joined) + _OVERHEAD
