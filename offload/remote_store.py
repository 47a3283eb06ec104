"""The remote tier: blocks in a Redis that replicas of several machines share.

A block is one value: 8 bytes of checksum and the encoded bytes. One sorted set per kind of block knows all of them by when they
were last used; it is what bounds them. Storing a block and giving up the oldest ones is one script, so the bound holds whoever
stores. What Redis itself throws away is found missing when it is asked for.

Which blocks are there is fetched every few seconds into a set of this process, so that asking costs no round trip: a block that
another machine has stored is seen that much later, and one that is gone is a load that fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import redis

from offload.checksum import Bytes, payload_checksum
from offload.errors import TierUnavailable
from offload.seldom import Seldom
from offload.tier import Outgoing, TierFigures
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

REMOTE = "remote"

_SUM_BYTES = 8
_REFRESH = 3.0
_TIMEOUT = 1.0
_PAGE = 1000

# KEYS: the value, the sorted set. ARGV: the value's bytes, the digest, now, how many may be there, what names begin with.
_STORE = """
redis.call('SET', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
local over = redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[4])
local gone = 0
if over > 0 then
  local oldest = redis.call('ZPOPMIN', KEYS[2], over)
  for at = 1, #oldest, 2 do
    redis.call('DEL', ARGV[5] .. oldest[at])
    gone = gone + 1
  end
end
return gone
"""


class RemoteStore:
    """A `Tier` in Redis. Blocks of `block_bytes` encoded bytes, `max_bytes` in all, over everybody with the same `key`."""

    name = REMOTE

    def __init__(self, url: str, key: BlockHash, block_bytes: int, max_bytes: int) -> None:
        """Raises TierUnavailable for a URL that is none; a server that is not there is not waited for."""
        self.block_bytes = block_bytes
        self._max_blocks = max_bytes // (block_bytes + _SUM_BYTES)
        self._prefix = b"turnkeep:kv:" + key.hex().encode() + b":"
        self._index = self._prefix + b"used"
        if self._max_blocks < 1:
            raise TierUnavailable(f"The remote tier has {max_bytes} bytes, but one block takes {block_bytes}; give it more.")
        try:
            self._client: Any = redis.Redis.from_url(url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT)
        except ValueError as error:
            raise TierUnavailable(f"remote: {error}") from error
        self._script = self._client.register_script(_STORE)
        self._known: set[BlockHash] = set()
        self._stored = self._evicted = self._healed = self._errors = 0
        self._damage = Seldom(logger)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="kv-remote", daemon=True)
        self._thread.start()

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        known = self._known
        for count, digest in enumerate(digests):
            if digest not in known:
                return count
        return len(digests)

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        if digest not in self._known:
            return False
        value = self._ask(lambda: self._client.get(self._prefix + digest))
        if value is None:
            self._known.discard(digest)
            self._ask(lambda: self._client.zrem(self._index, digest))
            return False
        payload = np.frombuffer(value, dtype=np.uint8)[_SUM_BYTES:]
        checksum = int.from_bytes(value[:_SUM_BYTES], "little")
        if len(payload) != len(into) or payload_checksum(payload, digest) != checksum:
            self._damage.say("a block in Redis was damaged and is gone.")
            self._healed += 1
            self.evict((digest,))
            return False
        np.copyto(into, payload)
        self._ask(lambda: self._client.zadd(self._index, {digest: time.time()}, xx=True))
        return True

    def ahead(self, digests: Sequence[BlockHash]) -> None:
        """Redis reads nothing ahead."""

    def store(self, blocks: Sequence[Outgoing]) -> list[BlockHash]:
        there = []
        for block in blocks:
            if block.digest in self._known:
                there.append(block.digest)
                continue
            # A copy first: what is sent is what was found intact.
            payload = block.payload.tobytes()
            if block.is_intact is not None and not block.is_intact():
                continue
            value = payload_checksum(payload, block.digest).to_bytes(_SUM_BYTES, "little") + payload
            keys = [self._prefix + block.digest, self._index]
            arguments = [value, block.digest, time.time(), self._max_blocks, self._prefix]
            self._evicted += self._ask(lambda keys=keys, arguments=arguments: self._script(keys=keys, args=arguments))
            self._stored += 1
            self._known.add(block.digest)
            there.append(block.digest)
        return there

    def evict(self, digests: Iterable[BlockHash]) -> int:
        gone = 0
        for digest in digests:
            self._known.discard(digest)
            gone += self._ask(lambda digest=digest: self._client.delete(self._prefix + digest))
            self._ask(lambda digest=digest: self._client.zrem(self._index, digest))
        return gone

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        """Recency is all that counts in Redis."""
        return len(digests)

    def figures(self) -> TierFigures:
        known = len(self._known)
        return TierFigures(
            blocks=known,
            used_bytes=known * (self.block_bytes + _SUM_BYTES),
            max_bytes=self._max_blocks * (self.block_bytes + _SUM_BYTES),
            stored=self._stored,
            evicted=self._evicted,
            healed=self._healed,
            errors=self._errors,
        )

    def check_integrity(self) -> None:
        """Redis keeps its own books."""

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2 * _TIMEOUT)
        self._client.close()

    def refresh(self) -> None:
        """Fetches which blocks are there. Raises TierUnavailable."""
        known: set[BlockHash] = set()
        start = 0
        while len(known) < self._max_blocks + _PAGE:
            first, last = start, start + _PAGE - 1
            page = self._ask(lambda first=first, last=last: self._client.zrange(self._index, first, last))
            known.update(page)
            if len(page) < _PAGE:
                break
            start += _PAGE
        self._known = known

    def _refresh(self) -> None:
        while not self._stop.is_set():
            try:
                self.refresh()
            except TierUnavailable as error:
                self._known = set()
                logger.debug("the remote tier: %s", error)
            self._stop.wait(_REFRESH)

    def _ask(self, call: Any) -> Any:
        try:
            return call()
        except redis.RedisError as error:
            self._errors += 1
            raise TierUnavailable(f"Redis: {error}") from error
