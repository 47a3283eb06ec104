"""Where sessions are kept, as a protocol. Keys are scoped by tenant: nothing here can be asked without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sessions.records import SessionRecord


@dataclass(frozen=True, slots=True)
class Page:
    """Sessions of one tenant, and the key to go on after (None: these were the last)."""

    records: tuple[SessionRecord, ...]
    after: str | None = None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds in this process. `evicted`: records dropped to stay within the bound, since the start."""

    sessions: int
    bytes: int
    evicted: int


class LedgerStore(Protocol):
    """Session records by (tenant, key). Nothing here raises when a backend is slow or gone: a record that cannot be had is
    None, a write that cannot be made is lost. Records are immutable and may be shared with the caller.

    A deletion begins a new epoch of its key, and a record of another one is not stored: what began before a deletion cannot
    undo it. A new record gets the epoch that `epoch` gives when its turn begins.
    """

    async def get(self, tenant: str, key: str) -> SessionRecord | None:
        """The newest record known, None when there is none (any more). Counts as use."""

    async def peek(self, tenant: str, key: str) -> SessionRecord | None:
        """The record as this process knows it, which may be older than the newest. Asks nobody."""

    async def put(self, record: SessionRecord) -> bool:
        """Stores a record that replaces version `record.version - 1`. False when another version is stored by now: read it,
        add what is new, try again; or when the session was deleted since the record's epoch. A record whose predecessor was
        dropped for other reasons (bounds, expiry) is stored."""

    def epoch(self, tenant: str, key: str) -> str:
        """The epoch of a key that has no record, as the last `get` of it found; "" when no deletion is remembered."""

    async def delete(self, tenant: str, key: str) -> bool:
        """Forgets a session, and begins a new epoch of its key. False when there was none."""

    async def touch(self, tenant: str, key: str) -> None:
        """It is in use: keep it."""

    async def recognise(self, tenant: str, names: Sequence[bytes]) -> str | None:
        """The key of the session that a conversation extends: `names` are those of its prefixes, shortest first
        (sessions.digests.prefix_names), and the longest one that a record has counts."""

    async def page(self, tenant: str, *, after: str | None, limit: int) -> Page:
        """Sessions of a tenant in the order of their keys, those behind `after`."""

    def stats(self) -> StoreStats:
        """What is held in this process."""

    async def aclose(self) -> None:
        """Frees connections; idempotent."""
