"""The host tier: one arena of shared memory for all replicas of a machine that have interchangeable KV.

A session that moves to a sibling finds its blocks there. Memory is taken as it is needed, up to the bound, and asked for
before it is touched. The arena goes when its last replica leaves; after a kill -9 of all of them it stays, and the next
replica of the same model finds it whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import psutil

from offload import slot_layout as layout
from offload.checksum import Bytes, key_salt, payload_checksum
from offload.errors import TierUnavailable
from offload.seldom import Seldom
from offload.slot_table import Place, SlotTable
from offload.tier import Outgoing, TierFigures
from prefix_cache.events import HOST
from prefix_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")

_GROWTH = 32 << 20
_HEADROOM = 256 << 20
_ALIGNMENT = 4096


class HostArena:
    """A `Tier` in shared memory. Blocks of `block_bytes` encoded bytes, `max_bytes` in all."""

    name = HOST

    def __init__(
        self,
        key: BlockHash,
        block_bytes: int,
        max_bytes: int,
        directory: Path = SHARED_MEMORY,
        available: Callable[[], int] | None = None,
    ) -> None:
        """key: names what makes blocks interchangeable (namespace and codec). available: bytes of memory that can be taken
        without anybody being killed. Raises TierUnavailable."""
        self.block_bytes = block_bytes
        slot_bytes = -(-block_bytes // _ALIGNMENT) * _ALIGNMENT
        slots = max_bytes // slot_bytes
        if slots < 1:
            raise TierUnavailable(f"The host tier has {max_bytes} bytes, but one block takes {slot_bytes}; give it more.")
        self._available = _machine if available is None else available
        _check_room(directory, max_bytes)
        path = directory / f"turnkeep-{os.getuid()}-host-{key.hex()}"
        self.table = SlotTable(path, key, slots, slot_bytes, payload=True)
        if self.table.slots != slots:
            logger.warning(
                "%s: other replicas use this arena of %d bytes already, so it stays that size instead of %d.",
                path,
                self.table.slots * slot_bytes,
                max_bytes,
            )
        self._slots: Bytes = np.frombuffer(self.table.memory, dtype=np.uint8, offset=self.table.payload_offset)
        self._slot_bytes = slot_bytes
        self._salt = key_salt(key)
        self._errors = 0
        self._damage = Seldom(logger)

    def slot(self, place: Place) -> Bytes:
        """The bytes of a slot, which others may overwrite at any moment."""
        start = place.slot * self._slot_bytes
        return self._slots[start : start + self.block_bytes]

    def prefix(self, digests: Sequence[BlockHash]) -> int:
        return self.table.prefix(digests)

    def lacking(self, digests: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return self.table.lacking(digests)

    def load(self, digest: BlockHash, into: Bytes) -> bool:
        place = self.table.find(digest)
        if place is None:
            return False
        if place.length != len(into):
            self._heal(place)
            self.table.rebuild()
            return False
        np.copyto(into, self.slot(place)[: place.length])
        # Of the copy: what is verified is what is used.
        sound = payload_checksum(into, digest, self._salt) == place.checksum
        if not self.table.is_still(place):
            return False
        if not sound:
            self._heal(place)
            return False
        self.table.touch((place,))
        return True

    def ahead(self, digests: Sequence[BlockHash]) -> None:
        """Memory needs no preparing."""

    def store(self, blocks: Sequence[Outgoing]) -> list[BlockHash]:
        table = self.table
        places = table.reserve(
            [block.digest for block in blocks],
            depths=[block.depth for block in blocks],
            session=blocks[0].session if blocks else 0,
            grow=self._grow,
        )
        written: list[tuple[Place, int, int]] = []
        spoilt: list[Place] = []
        try:
            for block, place in zip(blocks, places, strict=True):
                if place is None:
                    continue
                target = self.slot(place)[: len(block.payload)]
                np.copyto(target, block.payload)
                checksum = payload_checksum(target, block.digest, self._salt)
                if block.is_intact is None or block.is_intact():
                    written.append((place, len(target), checksum))
                else:
                    spoilt.append(place)
        finally:
            done = {place.slot for place, _, _ in written}
            spoilt.extend(place for place in places if place is not None and place.slot not in done and place not in spoilt)
            if spoilt:
                table.cancel(spoilt)
        table.commit(written)
        return [block.digest for block in blocks if table.find(block.digest) is not None]

    def evict(self, digests: Iterable[BlockHash]) -> int:
        found = (self.table.find(digest) for digest in digests)
        return len(self.table.drop([place for place in found if place is not None]))

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> int:
        return self.table.mark(digests, standing, expected=expected, session=session)

    def figures(self) -> TierFigures:
        table = self.table
        return TierFigures(
            blocks=table.count(),
            used_bytes=table.used_bytes,
            max_bytes=table.slots * self._slot_bytes,
            stored=table.counter(layout.H_STORED),
            evicted=table.counter(layout.H_EVICTED),
            healed=table.counter(layout.H_HEALED),
            reclaimed=table.counter(layout.H_RECLAIMED),
            errors=self._errors,
            users=table.members,
        )

    def check_integrity(self) -> None:
        self.table.check_integrity()

    def close(self) -> None:
        self.table.close()

    def verify(self) -> tuple[int, int]:
        """Reads every block; returns how many are sound and how many were not and are gone now."""
        sound = damaged = 0
        copy = np.empty(self.block_bytes, dtype=np.uint8)
        for place in self.table.places():
            np.copyto(copy[: place.length], self.slot(place)[: place.length])
            if not self.table.is_still(place):
                continue
            if payload_checksum(copy[: place.length], place.digest, self._salt) == place.checksum:
                sound += 1
            else:
                damaged += 1
                self._heal(place)
        return sound, damaged

    def trim(self, used_bytes: int) -> int:
        """Gives up blocks until `used_bytes` are used. Their memory stays the arena's. Returns how many went."""
        return len(self.table.shrink(used_bytes))

    def _heal(self, place: Place) -> None:
        self._damage.say("%s: the block in slot %d was damaged and is gone.", self.table.path, place.slot)
        self.table.drop((place,), damaged=True)

    def _grow(self, usable: int) -> int:
        size = self._slot_bytes
        status = os.fstatvfs(self.table.descriptor)
        room = min(status.f_bavail * status.f_frsize, self._available() - _HEADROOM) // size
        more = min(max(1, _GROWTH // size), self.table.slots - usable, room)
        if more < 1:
            return usable
        try:
            os.posix_fallocate(self.table.descriptor, self.table.payload_offset + usable * size, more * size)
        except OSError as error:
            if not self._errors:
                logger.warning("%s: no more shared memory is to be had (%s); the arena stays smaller.", self.table.path, error)
            self._errors += 1
            return usable
        return usable + more


def _machine() -> int:
    return int(psutil.virtual_memory().available)


def _check_room(directory: Path, max_bytes: int) -> None:
    """Says it when there is no place for shared memory, or too small a one. Raises TierUnavailable."""
    remedy = "docker run --shm-size, in Kubernetes an emptyDir of medium Memory, or a lower --host-kv-bytes"
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise TierUnavailable(
            f"{directory}, where shared memory is, cannot be used ({error.strerror}); give the container one: {remedy}."
        ) from error
    size = status.f_blocks * status.f_frsize
    if size < max_bytes:
        logger.warning(
            "%s holds %d bytes, the host tier could have %d; it stays smaller (%s).", directory, size, max_bytes, remedy
        )
