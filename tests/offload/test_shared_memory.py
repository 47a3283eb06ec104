"""Where shared memory is small, full or not there, as in containers; and who may read what lies in it and on disk."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import numpy as np
import pytest

from offload.arena import HostArena
from offload.codecs import BlockShape
from offload.config import OffloadConfig
from offload.disk_store import DiskStore
from offload.errors import TierUnavailable
from offload.slot_layout import H_USABLE
from offload.stack import open_tiers
from prefix_cache.hashing import namespace_digest
from tests.offload.blocks import digest_of, outgoing, payload_of
from tests.offload.conftest import BLOCK, KEY
from tests.offload.mounts import small_file_system


def loads(tier: HostArena, number: int, size: int) -> bool:
    into = np.zeros(size, dtype=np.uint8)
    return tier.load(digest_of(number), into) and np.array_equal(into, payload_of(number, size))


def test_an_arena_takes_what_a_small_place_has_and_says_that_it_is_small(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = 100_000
    with small_file_system(tmp_path / "shm", "4m") as place, caplog.at_level(logging.WARNING):
        arena = HostArena(KEY, size, 1 << 30, place)
        try:
            assert f"{place} holds {4 << 20} bytes, the host tier could have {1 << 30}; it stays smaller" in caplog.text
            assert "docker run --shm-size" in caplog.text
            for number in range(100):
                assert arena.store([outgoing(number, size)]) == [digest_of(number)]
            figures = arena.figures()
            assert 25 <= figures.blocks <= 40
            assert figures.errors == 0
            assert sum(loads(arena, number, size) for number in range(100)) == figures.blocks
            arena.check_integrity()
        finally:
            arena.close()
        assert list(place.iterdir()) == []
        # Not even the table fits; nothing of it stays.
        with pytest.raises(TierUnavailable, match="cannot be used: No space left on device"):
            HostArena(KEY, 4096, 1 << 40, place)
        assert list(place.iterdir()) == []


def test_memory_that_a_container_has_not_is_not_taken(tmp_path: Path) -> None:
    arena = HostArena(KEY, BLOCK, 1 << 20, tmp_path, lambda: limit - arena.table.counter(H_USABLE) * 4096)
    # What is left for others, and ten blocks.
    limit = (256 << 20) + 10 * 4096
    try:
        for number in range(30):
            arena.store([outgoing(number, BLOCK)])
        assert arena.figures().blocks == 10
        limit = 0
        assert arena.store([outgoing(100, BLOCK)]) == [digest_of(100)], "what it has it goes on using"
        assert arena.figures().blocks == 10
    finally:
        arena.close()


def test_without_a_place_for_shared_memory_tiers_are_left_out_and_why_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = OffloadConfig(
        host_bytes=1 << 20, disk=tmp_path / "disk", disk_bytes=1 << 20, disk_min_free=0, shared_memory=tmp_path / "absent"
    )
    stack = open_tiers(config, namespace_digest({"test": 1}), BlockShape(4, 8, "float32"))
    said = f"no host tier: {tmp_path / 'absent'}, where shared memory is, cannot be used (No such file or directory)"
    assert said in caplog.text
    assert "no disk tier for now: " in caplog.text
    (disk,) = stack.tiers
    assert disk.store([outgoing(1, 128)]) == []
    (tmp_path / "absent").mkdir()
    disk._clock = lambda: float("inf")
    assert disk.store([outgoing(1, 128)]) == [digest_of(1)], "it is there as soon as it can be"
    stack.close()


def test_nobody_else_may_read_what_is_kept(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    arena = HostArena(KEY, BLOCK, 1 << 20, tmp_path / "tables")
    disk = DiskStore(tmp_path / "disk", KEY, BLOCK, 1 << 20, min_free=0, tables=tmp_path / "tables")
    arena.store([outgoing(1, BLOCK)])
    disk.store([outgoing(1, BLOCK)])
    try:
        kept = [*(tmp_path / "tables").iterdir(), disk.place / "data", disk.place / "records"]
        assert len(kept) == 4
        for path in kept:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    finally:
        arena.close()
        disk.close()
