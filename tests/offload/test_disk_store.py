"""The disk tier: what is there after a restart, what its directory may hold, and what a medium that fails does to it."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offload import disk_layout
from offload.checksum import Bytes
from offload.disk_layout import FORMAT
from offload.disk_store import DiskStore
from offload.errors import TierUnavailable
from offload.files import Files
from tests.offload.blocks import digest_of, outgoing
from tests.offload.conftest import BLOCK, KEY
from tests.offload.test_tier_contract import loaded

MakeDisk = Callable[..., DiskStore]


class FailingFiles(Files):
    """The medium gives an error for what is in `failing`."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.number = errno.EIO
        self.free = 1 << 40

    def _may(self, what: str) -> None:
        if what in self.failing:
            raise OSError(self.number, os.strerror(self.number))

    def read_into(self, descriptor: int, into: Bytes, offset: int) -> int:
        self._may("read")
        return super().read_into(descriptor, into, offset)

    def write(self, descriptor: int, payload: Bytes | bytes, offset: int) -> None:
        self._may("write")
        super().write(descriptor, payload, offset)

    def free_bytes(self, path: Path) -> int:
        return self.free


def test_blocks_are_there_after_a_restart_the_oldest_still_the_first_to_go(disk: MakeDisk) -> None:
    store = disk(slots=4)
    for number in range(4):
        store.store([outgoing(number, BLOCK, depth=number)])
    store.close()
    again = disk(slots=4)
    assert [loaded(again, number) for number in range(5)] == [True] * 4 + [False]
    again.check_integrity()
    assert again.figures().used_bytes == 4 * BLOCK


def test_blocks_are_there_after_a_kill_of_all_and_the_shared_table_with_them_gone(disk: MakeDisk, tmp_path: Path) -> None:
    store = disk()
    store.store([outgoing(1, BLOCK), outgoing(2, BLOCK)])
    store.table.reserve([digest_of(3)])
    store.table.close(keep=True)
    shutil.rmtree(tmp_path / "tables")
    (tmp_path / "tables").mkdir()
    again = disk()
    assert [loaded(again, number) for number in (1, 2, 3)] == [True, True, False]


def test_a_smaller_bound_gives_space_back_and_a_larger_one_keeps_all(disk: MakeDisk) -> None:
    store = disk(slots=8)
    store.store([outgoing(number, BLOCK) for number in range(8)])
    place = store.place
    store.close()
    smaller = disk(slots=3)
    assert sum(loaded(smaller, number) for number in range(8)) == 3
    assert (place / "data").stat().st_size <= 3 * 4096
    smaller.close()
    assert sum(loaded(disk(slots=20), number) for number in range(8)) == 3


def test_trimming_gives_space_back_to_the_file_system(disk: MakeDisk) -> None:
    store = disk(slots=64)
    store.store([outgoing(number, BLOCK) for number in range(64)])
    store.flush()
    before = disk_layout.used_on_disk(store.place)
    assert store.trim(10 * BLOCK) == 54
    assert store.figures().used_bytes == 10 * BLOCK
    assert disk_layout.used_on_disk(store.place) <= before - 40 * 4096
    assert sum(loaded(store, number) for number in range(64)) == 10


def test_records_of_blocks_that_went_do_not_come_back(disk: MakeDisk) -> None:
    store = disk(slots=2)
    store.store([outgoing(1, BLOCK), outgoing(2, BLOCK)])
    store.evict([digest_of(1)])
    store.close()
    again = disk(slots=2)
    assert [loaded(again, number) for number in (1, 2)] == [False, True]
    assert again.figures().healed == 0


def test_what_another_version_left_is_named_and_not_read(
    disk: MakeDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / "disk" / "turnkeep-kv-0" / KEY.hex()
    old.mkdir(parents=True)
    (old / "data").write_bytes(b"old")
    with caplog.at_level(logging.WARNING):
        store = disk()
    assert "turnkeep-kv-0 is of another version and is not read; remove it when nothing uses it." in caplog.text
    store.store([outgoing(1, BLOCK)])
    store.close()
    assert (old / "data").read_bytes() == b"old"
    about = store.place / "about"
    content = json.loads(about.read_text())
    assert content["format"] == FORMAT
    about.write_text(json.dumps(content | {"format": 99}))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = disk()
    assert "was written by another version and is not read; it begins anew." in caplog.text
    assert not loaded(again, 1)
    assert again.figures().healed == 0


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": "x"}'])
def test_a_description_that_is_no_description_begins_anew(disk: MakeDisk, damage: bytes) -> None:
    store = disk()
    store.store([outgoing(1, BLOCK)])
    store.close()
    (store.place / "about").write_bytes(damage)
    again = disk()
    assert not loaded(again, 1)
    again.store([outgoing(1, BLOCK)])
    assert loaded(again, 1)


def test_several_models_in_one_directory_each_with_its_own_bound(disk: MakeDisk) -> None:
    one, other = disk(slots=2), disk(slots=5, key=digest_of(77))
    for number in range(20):
        one.store([outgoing(number, BLOCK)])
        other.store([outgoing(number, BLOCK)])
    assert one.figures().blocks == 2
    assert other.figures().blocks == 5


def test_models_that_nobody_has_used_for_long_go_and_those_in_use_stay(disk: MakeDisk) -> None:
    unused, used = disk(key=digest_of(77)), disk(key=digest_of(78))
    unused.store([outgoing(1, BLOCK)])
    unused.close()
    for store in (unused, used):
        os.utime(store.place / "in-use", (0, 0))
    disk()
    assert not unused.place.exists()
    assert used.place.exists()


def test_space_that_must_stay_free_stays_free(disk: MakeDisk) -> None:
    files = FailingFiles()
    store = disk(slots=100, files=files, min_free=1 << 30)
    files.free = (1 << 30) + 100 * 4096
    store.store([outgoing(number, BLOCK) for number in range(100)])
    assert store.figures().blocks == 100
    files.free = 1 << 29
    full = disk(slots=50, key=digest_of(77), files=files, min_free=1 << 30)
    assert full.store([outgoing(1, BLOCK)]) == []
    files.free = 1 << 40
    assert full.store([outgoing(1, BLOCK)]) == [digest_of(1)]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_medium_that_fails_to_write_loses_that_block_only(disk: MakeDisk, number: int) -> None:
    files = FailingFiles()
    store = disk(files=files)
    store.store([outgoing(1, BLOCK)])
    files.failing, files.number = {"write"}, number
    with pytest.raises(OSError) as error:
        store.store([outgoing(2, BLOCK), outgoing(3, BLOCK)])
    assert error.value.errno == number
    assert store.figures().errors == 1
    store.check_integrity()
    assert [loaded(store, block) for block in (1, 2, 3)] == [True, False, False]
    files.failing = set()
    assert store.store([outgoing(block, BLOCK) for block in range(8)]) == [digest_of(block) for block in range(8)]


def test_a_medium_that_fails_to_read_says_so_and_loses_nothing(disk: MakeDisk) -> None:
    files = FailingFiles()
    store = disk(files=files)
    store.store([outgoing(1, BLOCK)])
    files.failing = {"read"}
    with pytest.raises(OSError, match="Input/output"):
        loaded(store, 1)
    files.failing = set()
    assert loaded(store, 1)


def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(TierUnavailable, match="cannot be used: Not a directory"):
        DiskStore(tmp_path / "file", KEY, BLOCK, 1 << 20, tables=tmp_path)


def test_verifying_finds_damage_and_heals_it(disk: MakeDisk) -> None:
    store = disk()
    store.store([outgoing(number, BLOCK) for number in range(6)])
    place = store.table.find(digest_of(2))
    assert place is not None
    with (store.place / "data").open("r+b") as file:
        file.seek(place.slot * 4096 + 17)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes((byte[0] ^ 4,)))
    assert store.verify() == (5, 1)
    assert store.verify() == (5, 0)
    assert store.figures().healed == 1
    store.check_integrity()


def test_reading_ahead_asks_for_runs(disk: MakeDisk) -> None:
    asked: list[tuple[int, int]] = []

    class Watching(Files):
        def will_need(self, descriptor: int, offset: int, size: int) -> None:
            asked.append((offset, size))

    store = disk(files=Watching())
    store.store([outgoing(number, BLOCK) for number in range(6)])
    store.evict([digest_of(3)])
    store.ahead([digest_of(number) for number in range(6)])
    assert asked == [(0, 3 * 4096), (4 * 4096, 2 * 4096)]
    np.testing.assert_equal(sum(size for _, size in asked), 5 * 4096)
