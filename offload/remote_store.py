"""The remote tier: blocks in a Redis that replicas of several machines share.

A block is one value: 8 bytes of checksum and the encoded bytes. What bounds them, and which go first, is kept beside them and
changed in the same step (offload.remote_scripts), so the bound and the order hold whoever stores. What Redis itself throws away
is found missing when it is asked for.

Which blocks are there is fetched every few seconds into a set of this process, so that asking costs no round trip: a block that
another machine has stored is seen that much later, and one that is gone is a load that fails.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from offload.checksum import Bytes
from offload.errors import TierUnavailable
from offload.remote_books import SUM_BYTES, RemoteAbout, RemoteBooks, RemoteTotals, connect, other_formats
from offload.seldom import Seldom
from offload.tier import Outgoing, TierFigures
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

REMOTE = "remote"

_REFRESH = 3.0


class RemoteStore:
    """A `Tier` in Redis. Blocks of `block_bytes` encoded bytes, `max_bytes` in all, over everybody with the same `key`."""

    name = REMOTE

    def __init__(self, url: str, key: BlockHash, block_bytes: int, max_bytes: int, *, model: str = "", codec: str = "") -> None:
        """model, codec: for those who look. Raises TierUnavailable for a URL that is none; a server that is not there is not
        waited for."""
        self.block_bytes = block_bytes
        self._value_bytes = block_bytes + SUM_BYTES
        self._max_blocks = max_bytes // self._value_bytes
        if self._max_blocks < 1:
            raise TierUnavailable(f"The remote tier has {max_bytes} bytes, but one block takes {block_bytes}; give it more.")
        self._client = connect(url)
        self.books = RemoteBooks(self._client, key)
        self._about = RemoteAbout(model, codec, self._value_bytes, self._max_blocks * self._value_bytes)
        self._known: set[BlockHash] = set()
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._meanwhile: dict[BlockHash, bool] = {}  # what became known while looking
        self._totals = RemoteTotals()
        self._looked_at: RemoteTotals | None = None
        self._damage = Seldom(logger)
        self._has_warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="kv-remote", daemon=True)
        self._thread.start()

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        known = self._known
        for count, digest in enumerate(digests):
            if digest not in known:
                return count
        return len(digests)

    def lacking(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        known = self._known
        return [digest for digest in digests if digest not in known]

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        if digest not in self._known:
            return False
        try:
            payload = self.books.load(digest)
        except ValueError:
            self._heal(digest)
            return False
        if payload is None:
            self._learned((digest,), there=False)
            return False
        if len(payload) != len(into):
            self._heal(digest)
            return False
        np.copyto(into, np.frombuffer(payload, dtype=np.uint8))
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
            totals = self.books.store(block.digest, payload, block.depth, block.session, self._max_blocks)
            self._learned((block.digest,), there=True)
            self._saw(totals)
            there.append(block.digest)
        return there

    def evict(self, digests: Iterable[BlockHash]) -> int:
        gone = tuple(digests)
        return self._drop(gone, "evicted")

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        return self.books.mark(digests, standing, expected, session)

    def figures(self) -> TierFigures:
        """As of the last look, which asking does not wait for."""
        blocks = len(self._known)
        totals = self._totals
        return TierFigures(
            blocks=blocks,
            used_bytes=blocks * self._value_bytes,
            max_bytes=self._max_blocks * self._value_bytes,
            stored=totals.stored,
            evicted=totals.evicted,
            healed=totals.healed,
        )

    def check_integrity(self) -> None:
        """Redis keeps its own books."""

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2.0)
        self._client.close()

    def refresh(self) -> None:
        """Fetches which blocks are there. Raises TierUnavailable."""
        with self._looking:
            totals = self.books.announce(self._about)
            if not self._has_warned:
                self._has_warned = True
                for number in other_formats(self._client):
                    logger.warning(
                        "Redis holds KV blocks of another version (format %d), which are not read; they expire unused.", number
                    )
            self._saw(totals)
            if totals == self._looked_at:
                return
            with self._lock:
                self._meanwhile = {}
            known = set(self.books.digests())
            with self._lock:
                for digest, there in self._meanwhile.items():
                    (known.add if there else known.discard)(digest)
                self._known = known
            # What others have changed since then changes the totals too, and is fetched the next time.
            self._looked_at = totals

    def _refresh(self) -> None:
        while not self._stop.is_set():
            try:
                self.refresh()
            except TierUnavailable as error:
                self._known, self._looked_at = set(), None
                logger.debug("the remote tier: %s", error)
            self._stop.wait(_REFRESH)

    def _learned(self, digests: Iterable[BlockHash], *, there: bool) -> None:
        with self._lock:
            for digest in digests:
                (self._known.add if there else self._known.discard)(digest)
                self._meanwhile[digest] = there
            if len(self._meanwhile) > 2 * self._max_blocks:
                self._meanwhile.clear()

    def _saw(self, totals: RemoteTotals) -> None:
        # Answers may come out of order, and totals never fall.
        with self._lock:
            self._totals = RemoteTotals(*map(max, self._totals, totals))

    def _heal(self, digest: BlockHash) -> None:
        self._damage.say("a block in Redis was damaged and is gone.")
        self._drop((digest,), "healed")

    def _drop(self, digests: Sequence[BlockHash], counted: str) -> int:
        self._learned(digests, there=False)
        count, totals = self.books.drop(digests, counted)
        # Again: who looked in between may have found them still there.
        self._learned(digests, there=False)
        self._saw(totals)
        return count
