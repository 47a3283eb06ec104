"""The tiers of a configuration, opened: what can be used of them is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from offload.arena import HostArena
from offload.codecs import BlockShape, make_codec
from offload.compression import OVERHEAD, CompressedTier
from offload.config import OffloadConfig
from offload.disk_store import DiskStore
from offload.errors import TierMisconfigured, TierUnavailable
from offload.estimate import TransferCost
from offload.files import Files
from offload.guard import GuardedTier
from offload.mirror import TierMirror
from offload.remote_store import RemoteStore
from offload.reopening import ReopeningTier
from offload.table_file import remove_abandoned
from offload.tier import Tier
from prefix_cache.events import DISK, HOST
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

_ABANDONED_AFTER = 3 * 3600.0

# Bytes a second, before anything was measured.
_HOST_RATE, _DISK_RATE, _REMOTE_RATE = 2e9, 3e8, 5e7


@dataclass(frozen=True, slots=True)
class TierStack:
    """Tiers, the fastest first, and the mirrors of those whose contents can be told to the world."""

    tiers: tuple[GuardedTier, ...]
    mirrors: tuple[TierMirror, ...]

    def close(self) -> None:
        """Leaves all of them."""
        for tier in self.tiers:
            tier.close()


def tier_key(namespace: BlockHash, codec: str, compressed: bool = False) -> BlockHash:
    """16 bytes under which blocks of a namespace, kept in this way, are interchangeable."""
    return xxhash.xxh3_128_digest(b"tier\x00" + namespace + codec.encode() + (b"+zstd" if compressed else b""))


def open_tiers(
    config: OffloadConfig,
    namespace: BlockHash,
    shape: BlockShape,
    model: str = "",
    available: Callable[[], int] | None = None,
    files: Files | None = None,
) -> TierStack:
    """Opens them. One that cannot be used is said in the log and left out. available: as of HostArena, files: of
    DiskStore. Raises TierUnavailable for a codec that does not fit."""
    encoded = make_codec(config.codec, shape).encoded_bytes
    tiers: list[GuardedTier] = []
    mirrors: list[TierMirror] = []
    for path in remove_abandoned(config.shared_memory, f"turnkeep-{os.getuid()}-", _ABANDONED_AFTER):
        logger.info("%s: nobody has used it for hours; it is gone.", path)
    if config.host_bytes:
        try:
            key = tier_key(namespace, config.codec)
            arena = HostArena(key, encoded, config.host_bytes, config.shared_memory, available)
            tiers.append(GuardedTier(arena, TransferCost(encoded / _HOST_RATE)))
            mirrors.append(TierMirror(arena.table, HOST))
        except (TierUnavailable, OSError) as error:
            logger.warning("no host tier: %s", error)
    if config.disk is not None:
        mirror = TierMirror(None, DISK)
        disk = ReopeningTier(
            DISK, lambda: _open_disk(config, namespace, encoded, shape, model, mirror, files), config.disk_bytes
        )
        tries = True
        try:
            disk.open()
        except TierMisconfigured as error:
            logger.warning("no disk tier: %s", error)
            tries = False
        except (TierUnavailable, OSError) as error:
            logger.warning("no disk tier for now: %s It is tried again whenever there is something to keep.", error)
        if tries:
            tiers.append(GuardedTier(disk, TransferCost(encoded / _DISK_RATE)))
            mirrors.append(mirror)
    if config.remote is not None:
        try:
            key = tier_key(namespace, config.codec)
            remote = RemoteStore(config.remote, key, encoded, config.remote_bytes, model=model, codec=config.codec)
            tiers.append(GuardedTier(remote, TransferCost(encoded / _REMOTE_RATE)))
        except TierUnavailable as error:
            logger.warning("no remote tier: %s", error)
    return TierStack(tuple(tiers), tuple(mirrors))


def _open_disk(
    config: OffloadConfig,
    namespace: BlockHash,
    encoded: int,
    shape: BlockShape,
    model: str,
    mirror: TierMirror,
    files: Files | None,
) -> Tier:
    if config.disk is None:
        raise TierMisconfigured("No directory is given.")
    store = DiskStore(
        config.disk,
        tier_key(namespace, config.codec, config.compress),
        encoded + OVERHEAD if config.compress else encoded,
        config.disk_bytes,
        min_free=config.disk_min_free,
        overcommit=2 if config.compress else 1,
        model=model,
        codec=f"{config.codec}+zstd" if config.compress else config.codec,
        tables=config.shared_memory,
        files=files,
    )
    tier: Tier = store
    if config.compress:
        try:
            tier = CompressedTier(store, encoded, shape.element_bytes if config.codec == "raw" else 1)
        except TierMisconfigured:
            store.close()
            raise
    mirror.follow(store.table)
    return tier
