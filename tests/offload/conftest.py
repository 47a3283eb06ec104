"""Tiers in temporary directories; nothing of a test is left in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.arena import HostArena
from offload.disk_store import DiskStore
from offload.files import Files
from tests.offload.blocks import digest_of

KEY = digest_of(10**9)
BLOCK = 3000
"""Bytes of a block; its slot takes a page."""


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Callable[..., HostArena]]:
    """Makes arenas of `slots` slots, siblings of each other as long as they have one `key`."""
    made: list[HostArena] = []

    def make(slots: int = 8, key: bytes = KEY, block: int = BLOCK) -> HostArena:
        made.append(HostArena(key, block, slots * 4096, tmp_path))
        return made[-1]

    yield make
    for arena in made:
        arena.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Makes disk tiers of `slots` slots in one directory."""
    made: list[DiskStore] = []
    (tmp_path / "tables").mkdir()

    def make(slots: int = 8, key: bytes = KEY, block: int = BLOCK, files: Files | None = None, **settings: int) -> DiskStore:
        made.append(
            DiskStore(
                tmp_path / "disk",
                key,
                block,
                slots * (4096 + 64),
                files=files,
                tables=tmp_path / "tables",
                **({"min_free": 0} | settings),
            )
        )
        return made[-1]

    yield make
    for store in made:
        store.close()
