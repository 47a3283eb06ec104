"""Sessions in this process: bounded by bytes, least recently used first."""

from __future__ import annotations

import heapq
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from sessions.records import SessionRecord
from sessions.store import Page, StoreStats

Key = tuple[str, str]

_MAX_NAMES = 256
_MAX_EPOCHS = 10_000


class _Kept(NamedTuple):
    """A record, and what it counts for."""

    record: SessionRecord
    nbytes: int


class MemoryLedgerStore:
    """A `sessions.store.LedgerStore`. Use on one event loop."""

    def __init__(self, max_bytes: int) -> None:
        """Raises ValueError for a bound below one byte."""
        if max_bytes < 1:
            raise ValueError(f"sessions.max_bytes must be at least 1, not {max_bytes}")
        self._max_bytes = max_bytes
        self._records: OrderedDict[Key, _Kept] = OrderedDict()
        # Of keys that were deleted, the latest last; a turn is over long before as many others are.
        self._epochs: OrderedDict[Key, str] = OrderedDict()
        self._by_name: dict[tuple[str, bytes], str] = {}
        self._bytes = 0
        self._evicted = 0

    async def get(self, tenant: str, key: str) -> SessionRecord | None:
        kept = self._records.get((tenant, key))
        if kept is None:
            return None
        self._records.move_to_end((tenant, key))
        return kept.record

    async def peek(self, tenant: str, key: str) -> SessionRecord | None:
        return await self.get(tenant, key)

    async def put(self, record: SessionRecord) -> bool:
        at = (record.tenant, record.key)
        if self._epochs.get(at, record.epoch) != record.epoch:
            return False
        known = self._records.get(at)
        if known is not None and known.record.version != record.version - 1:
            return False
        self.replace(record)
        return True

    def replace(self, record: SessionRecord) -> None:
        """Stores a record whatever stands there. One that is larger than the bound is not kept."""
        at = (record.tenant, record.key)
        self._drop(at)
        self._begin(at, record.epoch)
        size = record.nbytes
        if size > self._max_bytes:
            self._evicted += 1
            return
        self._records[at] = _Kept(record, size)
        self._bytes += size
        for name in record.prefix_names():
            self._by_name[record.tenant, name] = record.key
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._records)))
            self._evicted += 1

    async def delete(self, tenant: str, key: str) -> bool:
        # Nothing can be on its way to a session that never was: strangers' guesses are not remembered.
        return (tenant, key) in self._records and self.bury(tenant, key, new_epoch())

    def bury(self, tenant: str, key: str, epoch: str) -> bool:
        """Forgets a session whose deletion has a name. False when there was none."""
        self._begin((tenant, key), epoch)
        return self._drop((tenant, key))

    def epoch(self, tenant: str, key: str) -> str:
        return self._epochs.get((tenant, key), "")

    async def touch(self, tenant: str, key: str) -> None:
        if (tenant, key) in self._records:
            self._records.move_to_end((tenant, key))

    async def recognise(self, tenant: str, names: Sequence[bytes]) -> str | None:
        for name in reversed(names):
            key = self._by_name.get((tenant, name))
            if key is not None:
                return key
        return None

    async def page(self, tenant: str, *, after: str | None, limit: int) -> Page:
        behind = (key for owner, key in self._records if owner == tenant and (after is None or key > after))
        keys = heapq.nsmallest(limit + 1, behind)
        records = tuple(self._records[tenant, key].record for key in keys[:limit])
        return Page(records, keys[limit - 1] if len(keys) > limit else None)

    def stats(self) -> StoreStats:
        return StoreStats(len(self._records), self._bytes, self._evicted)

    async def aclose(self) -> None:
        return None

    def _begin(self, at: Key, epoch: str) -> None:
        self._epochs.pop(at, None)
        if epoch:
            self._epochs[at] = epoch
            if len(self._epochs) > _MAX_EPOCHS:
                self._epochs.popitem(last=False)

    def _drop(self, at: Key) -> bool:
        kept = self._records.pop(at, None)
        if kept is None:
            return False
        self._bytes -= kept.nbytes
        tenant, key = at
        for name in kept.record.prefix_names():
            # Another session may have taken the name over since.
            if self._by_name.get((tenant, name)) == key:
                del self._by_name[tenant, name]
        return True


def new_epoch() -> str:
    """A name for a deletion."""
    return secrets.token_hex(8)


async def recognised_in_memory(
    memory: MemoryLedgerStore, tenant: str, names: Sequence[bytes]
) -> tuple[str | None, list[bytes]]:
    """What memory recognises by `names` (LedgerStore.recognise), and which of them a slower store is still worth asking for:
    those of a longer match, the longest `_MAX_NAMES` at most."""
    found = await memory.recognise(tenant, names)
    start = 0
    record = await memory.get(tenant, found) if found is not None else None
    if record is not None:
        known = set(record.prefix_names())
        start = max((position + 1 for position, name in enumerate(names) if name in known), default=0)
    return found, list(names[start:])[-_MAX_NAMES:]
