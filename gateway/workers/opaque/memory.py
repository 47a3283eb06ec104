"""What an opaque worker can be expected to have in its cache: chunks of the texts that were sent there, told as KV events.

Nobody says what such a worker keeps. It is taken to keep the latest of what it computed; where it says that it had cached
less than expected, what was last used as long ago as the missing part is taken to be gone as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from prefix_cache.event_log import EventLog
from prefix_cache.events import BlocksRemoved, BlocksStored, KVEvent
from prefix_cache.hashing import BlockHash, join_digests


class ChunkMemory:
    """Digests of chunks, least recently used first; at most `max_chunks`. Changes are appended to `log`."""

    def __init__(self, instance: str, max_chunks: int = 100_000) -> None:
        self.log = EventLog(instance)
        self._max_chunks = max_chunks
        self._chunks: OrderedDict[BlockHash, None] = OrderedDict()
        self.contradictions = 0
        """How often the worker had cached less than it was taken to have."""

    def __len__(self) -> int:
        return len(self._chunks)

    def held(self) -> bytes:
        """All digests, joined."""
        return join_digests(self._chunks)

    def answered(self, digests: Sequence[BlockHash], root: BlockHash, cached_share: float | None) -> None:
        """The worker has computed a text of these chunks. `cached_share`: of the text, as it says; None: it does not say."""
        events: list[KVEvent] = []
        if cached_share is not None:
            events += self._believe(digests, cached_share)
        fresh = [digest for digest in digests if digest not in self._chunks]
        # The end of a text is given up before its beginning, as every prefix cache does.
        for digest in reversed(digests):
            self._chunks[digest] = None
            self._chunks.move_to_end(digest)
        if fresh:
            first = digests.index(fresh[0])
            events.append(BlocksStored(join_digests(fresh), digests[first - 1] if first else root))
        gone = []
        while len(self._chunks) > self._max_chunks:
            gone.append(self._chunks.popitem(last=False)[0])
        if gone:
            events.append(BlocksRemoved(join_digests(gone)))
        self.log.append(events)

    def _believe(self, digests: Sequence[BlockHash], share: float) -> list[KVEvent]:
        expected = 0
        while expected < len(digests) and digests[expected] in self._chunks:
            expected += 1
        # Tokens and characters do not run in step, and workers count whole blocks: only a clear difference counts.
        slack = max(2, expected // 8)
        found = round(min(max(share, 0.0), 1.0) * len(digests))
        if found + slack >= expected:
            return []
        self.contradictions += 1
        missing = set(digests[found:expected])
        gone: list[BlockHash] = []
        for digest in self._chunks:
            gone.append(digest)
            missing.discard(digest)
            if not missing:
                break
        kept = set(digests[:found])
        gone = [digest for digest in gone if digest not in kept]
        for digest in gone:
            del self._chunks[digest]
        return [BlocksRemoved(join_digests(gone))]
