"""KV events: what a worker tells the world about the blocks it holds.

Wire types only hold data; `EventLog` numbers the batches of one worker's life, keeps a bounded tail of them for replay and
can make a snapshot for a subscriber that comes late. A subscriber that has seen sequence number `s` of worker life
`instance` asks for what comes after `s`; it gets the missing batches if the log still has them and this is the same life,
else a snapshot and whatever follows.
"""

from __future__ import annotations

import msgspec

DEVICE, HOST, DISK = "device", "host", "disk"


class BlocksStored(msgspec.Struct, frozen=True, tag_field="type", tag="stored", omit_defaults=True):
    """Blocks that can now be found. `digests` are joined, in chain order; `parent` is the digest before the first."""

    digests: bytes
    parent: bytes
    tier: str = DEVICE


class BlocksRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="removed", omit_defaults=True):
    """Blocks that can no longer be found in `tier`. `digests` are joined, in no particular order."""

    digests: bytes
    tier: str = DEVICE


class AllCleared(msgspec.Struct, frozen=True, tag_field="type", tag="cleared"):
    """Everything of every tier is gone."""


KVEvent = BlocksStored | BlocksRemoved | AllCleared


class EventBatch(msgspec.Struct, frozen=True, tag_field="type", tag="batch"):
    """What one engine step changed. `seq` counts 1, 2, 3 ... within one `instance` (one life of one worker)."""

    instance: str
    seq: int
    events: tuple[KVEvent, ...]


class Snapshot(msgspec.Struct, frozen=True, tag_field="type", tag="snapshot"):
    """Everything a worker holds after batch `seq`: tier -> joined digests. Replaces all a subscriber knew of it."""

    instance: str
    seq: int
    tiers: dict[str, bytes]


class Heartbeat(msgspec.Struct, frozen=True, tag_field="type", tag="heartbeat"):
    """Sent while nothing changes, so that a subscriber can tell silence from a dead connection, and detect a gap."""

    instance: str
    seq: int


KVMessage = EventBatch | Snapshot | Heartbeat
