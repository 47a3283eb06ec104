"""What becomes of the disk tier when its medium fails: full, read-only, removed, slow, broken, or without power."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from offload.disk_store import DiskStore
from offload.errors import TierGone, TierUnavailable
from offload.estimate import TransferCost
from offload.guard import GuardedTier
from offload.mirror import TierMirror
from offload.reopening import ReopeningTier
from prefix_cache.events import DISK, BlocksRemoved, BlocksStored
from prefix_cache.hashing import split_digests
from tests.offload.blocks import digest_of, outgoing, payload_of
from tests.offload.conftest import BLOCK, KEY
from tests.offload.faulty_files import FaultyFiles, VolatileFiles
from tests.offload.mounts import mount, small_file_system

Stored = list[bytes]


class Disk:
    """A disk tier as an engine has it: guarded, reopened, mirrored; on a clock of its own."""

    def __init__(
        self, directory: Path, tables: Path, slots: int = 64, files: FaultyFiles | None = None, min_free: int = 0
    ) -> None:
        self.now = 0.0
        self.mirror = TierMirror(None, DISK)
        self.told: set[bytes] = set()

        def opening() -> DiskStore:
            store = DiskStore(directory, KEY, BLOCK, slots * (4096 + 64), min_free=min_free, files=files, tables=tables)
            store._checked = float("-inf")  # looks each time
            self.mirror.follow(store.table)
            return store

        self.reopening = ReopeningTier(DISK, opening, slots * 4096)
        self.tier = GuardedTier(self.reopening, TransferCost(0.01), clock=lambda: self.now)

    @property
    def store(self) -> DiskStore:
        inner = self.reopening.inner
        assert isinstance(inner, DiskStore)
        return inner

    def keep(self, *numbers: int) -> Stored:
        if isinstance(self.reopening.inner, DiskStore):
            self.reopening.inner._checked = float("-inf")
        return self.tier.store([outgoing(number, BLOCK) for number in numbers])

    def has(self, number: int) -> bool:
        into = np.zeros(BLOCK, dtype=np.uint8)
        if not self.tier.load(digest_of(number), into):
            return False
        np.testing.assert_array_equal(into, payload_of(number, BLOCK))
        return True

    def listen(self) -> set[bytes]:
        for event in self.mirror.poll():
            assert isinstance(event, (BlocksStored, BlocksRemoved))
            change = self.told.update if isinstance(event, BlocksStored) else self.told.difference_update
            change(split_digests(event.digests))
        assert set(split_digests(self.mirror.snapshot())) == self.told
        return self.told


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    made: list[Disk] = []
    (tmp_path / "tables").mkdir()

    def make(directory: Path | None = None, **settings: object) -> Disk:
        made.append(Disk(directory or tmp_path / "disk", tmp_path / "tables", **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.tier.close()


def test_a_directory_that_is_removed_while_it_is_used_is_made_anew(disk: Callable[..., Disk], tmp_path: Path) -> None:
    one, sibling = disk(), disk()
    assert one.keep(1, 2) == sibling.keep(1, 2) == [digest_of(1), digest_of(2)]
    assert one.listen() == sibling.listen() == {digest_of(1), digest_of(2)}
    shutil.rmtree(tmp_path / "disk")
    assert one.keep(3) == []
    assert (one.tier.errors, one.tier.is_available) == (1, False)
    assert one.keep(3) == [], "it is left alone first"
    one.now += 1.5
    assert one.keep(3) == [digest_of(3)]
    assert [one.has(number) for number in (1, 2, 3)] == [False, False, True]
    assert one.listen() == {digest_of(3)}
    # The sibling has not noticed yet, and finds what was made anew once it has.
    assert sibling.keep(4) == []
    sibling.now += 1.5
    assert sibling.keep(4) == [digest_of(4)]
    assert [sibling.has(number) for number in (3, 4)] == [one.has(number) for number in (3, 4)] == [True, True]
    assert one.store.place.is_dir()
    for each in (one, sibling):
        each.reopening.check_integrity()
        assert each.listen() == {digest_of(3), digest_of(4)}
    # Another process finds it after a restart.
    one.tier.close()
    sibling.tier.close()
    later = disk()
    later.keep(5)
    assert [later.has(number) for number in (1, 3, 4, 5)] == [False, True, True, True]


def test_a_place_that_cannot_be_used_yet_is_used_once_it_can(disk: Callable[..., Disk], tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.write_text("no directory")
    late = disk()
    with pytest.raises(TierUnavailable, match="cannot be used: Not a directory"):
        late.reopening.open()
    assert late.tier.prefix([digest_of(1)]) == 0
    assert late.keep(1) == []
    assert late.tier.figures().max_bytes == 64 * 4096
    place.unlink()
    late.now += 1.5
    assert late.keep(1) == [digest_of(1)]
    assert late.has(1)
    assert late.listen() == {digest_of(1)}


def test_who_is_in_a_call_when_the_place_goes_ends_it_and_nobody_writes_elsewhere(
    disk: Callable[..., Disk], tmp_path: Path
) -> None:
    files = FaultyFiles()
    one = disk(files=files)
    one.keep(1)
    files.hanging = {"read"}
    answers: list[bool] = []
    reader = threading.Thread(target=lambda: answers.append(one.has(1)))
    reader.start()
    assert files.entered.wait(30)
    old = one.store
    shutil.rmtree(tmp_path / "disk")
    assert one.keep(2) == []
    assert old._data >= 0, "it is open as long as somebody reads in it"
    one.now += 1.5
    files.hanging = set()
    assert one.keep(2) == [digest_of(2)]
    assert old._data >= 0
    files.let_go.set()
    reader.join(30)
    assert answers == [True]
    assert old._data == -1
    assert one.has(2)


def test_a_file_system_that_is_full_keeps_what_fits_and_goes_on_when_there_is_room(
    disk: Callable[..., Disk], tmp_path: Path
) -> None:
    with small_file_system(tmp_path / "small", "200k") as place:
        (place / "other").write_bytes(bytes(60 << 10))
        # Somebody else took the space between the question and the write.
        full = disk(place / "kv", slots=400, files=FaultyFiles())
        kept = set()
        for number in range(100):
            full.now += 100
            if full.keep(number):
                kept.add(number)
        assert 5 < len(kept) < 40
        assert full.tier.errors > 0
        assert full.keep(100) == []
        assert not full.tier.is_available
        # What cannot be written to can be read from.
        for number in kept:
            assert full.has(number)
        full.reopening.check_integrity()
        assert full.tier.figures().healed == 0
        (place / "other").unlink()
        full.now += 100
        assert full.keep(200, 201) == [digest_of(200), digest_of(201)]
        assert full.has(200)
        full.tier.close()


def test_free_space_that_is_to_stay_is_not_taken_on_a_real_file_system(disk: Callable[..., Disk], tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "1m") as place:
        guarded = disk(place / "kv", slots=1, min_free=400 << 10)
        other = disk(place / "more", slots=1000, min_free=400 << 10)
        for number in range(300):
            other.keep(number)
        assert other.tier.errors == 0
        # But for what names and directories take.
        assert shutil.disk_usage(place).free >= (400 - 20) << 10
        assert guarded.keep(1) in ([], [digest_of(1)])
        other.tier.close()
        guarded.tier.close()


def test_a_read_only_file_system_is_said_and_used_once_it_can_be_written_to(disk: Callable[..., Disk], tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "4m") as place:
        before = disk(place / "kv")
        before.keep(1, 2)
        before.tier.close()
        mount("-o", "remount,ro", place)
        tier = disk(place / "kv")
        with pytest.raises(TierUnavailable, match="cannot be used: Read-only file system"):
            tier.reopening.open()
        assert tier.keep(3) == []
        assert (tier.tier.errors, tier.has(1)) == (1, False)
        mount("-o", "remount,rw", place)
        tier.now += 1.5
        assert tier.keep(3) == [digest_of(3)]
        assert [tier.has(number) for number in (1, 2, 3)] == [True, True, True]
        tier.tier.close()


@pytest.mark.parametrize("what", ["read", "write", "sync"])
def test_a_medium_that_fails_is_left_alone_and_tried_again(disk: Callable[..., Disk], what: str) -> None:
    files = FaultyFiles()
    tier = disk(files=files)
    tier.keep(1, 2)
    files.failing = {what}
    if what == "sync":
        tier.store._unsynced = 1 << 30
    failed = tier.has(1) if what == "read" else bool(tier.keep(3))
    assert not failed
    assert (tier.tier.errors, tier.tier.is_available) == (1, False)
    tier.now += 1.5
    assert not (tier.has(1) if what == "read" else tier.keep(4) and what == "write")
    files.failing = set()
    tier.now += 200
    assert tier.keep(5) == [digest_of(5)]
    assert [tier.has(number) for number in (1, 2, 5)] == [True, True, True]
    assert tier.tier.figures().healed == 0
    tier.reopening.check_integrity()


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_what_was_removed_by_a_failing_medium_does_not_come_back_wrong(disk: Callable[..., Disk], number: int) -> None:
    files = FaultyFiles()
    files.number = number
    tier = disk(files=files, slots=4)
    tier.keep(1, 2, 3, 4)
    files.failing = {"write"}
    # Evicts block 1 in memory; the record on disk stays, because it cannot be written.
    tier.keep(5)
    files.failing = set()
    tier.tier.close()
    again = disk(slots=4)
    again.keep(6)
    assert [again.has(block) for block in (5, 6)] == [False, True]
    assert sum(again.has(block) for block in (1, 2, 3, 4)) >= 2


def test_a_loss_of_power_loses_what_was_not_synced_and_nothing_else(tmp_path: Path) -> None:
    """Sectors that were not synced are there or not, at random, torn in the middle of a block too; the shared table is gone."""
    chance = random.Random(5)
    tables = tmp_path / "tables"
    lost_sectors = healed = kept_unsynced = 0
    for round_ in range(60):
        files = VolatileFiles()
        tables.mkdir()
        store = DiskStore(tmp_path / "disk", KEY, BLOCK, 24 * (4096 + 64), min_free=0, files=files, tables=tables)
        safe: set[int] = set()
        for _ in range(chance.randrange(1, 12)):
            numbers = chance.sample(range(60), 5)
            store.store([outgoing(number, BLOCK, depth=at) for at, number in enumerate(numbers)])
            store.evict([digest_of(chance.randrange(60))])
            safe = {number for number in safe if store.table.find(digest_of(number))}
            if chance.random() < 0.3:
                store.flush()
                safe = {number for number in range(60) if store.table.find(digest_of(number))}
                safe_places = {number: store.table.find(digest_of(number)) for number in safe}
        safe = {number for number in safe if store.table.find(digest_of(number)) == safe_places[number]}
        there = {number for number in range(60) if store.table.find(digest_of(number))}
        lost_sectors += files.lose_power(chance, chance.choice((0.1, 0.5, 1.0)))
        store.table.close(keep=True)
        store.close()
        shutil.rmtree(tables)
        tables.mkdir()
        again = DiskStore(tmp_path / "disk", KEY, BLOCK, 24 * (4096 + 64), min_free=0, tables=tables)
        found = set()
        known = again.table.count()
        into = np.empty(BLOCK, dtype=np.uint8)
        for number in range(60):
            if again.load(digest_of(number), into):
                assert np.array_equal(into, payload_of(number, BLOCK)), f"block {number} is wrong"
                found.add(number)
        assert safe <= found, f"round {round_}: {safe - found} were synced"
        assert again.figures().healed == known - len(found)
        healed += again.figures().healed
        kept_unsynced += len(found & (there - safe))
        again.check_integrity()
        again.close()
        shutil.rmtree(tables)
    assert lost_sectors > 1000
    assert healed > 20
    assert kept_unsynced > 20


def test_gone_is_a_kind_of_unavailable() -> None:
    assert issubclass(TierGone, TierUnavailable), "guards catch it"


def test_pauses_grow_while_it_fails_and_begin_anew_when_it_works(disk: Callable[..., Disk]) -> None:
    files = FaultyFiles()
    tier = disk(files=files)
    tier.keep(1)
    files.failing = {"write"}
    at = []
    while tier.now < 400:
        before = tier.tier.errors
        tier.keep(2)
        tier.tier.mark([digest_of(1)], 1)
        if tier.tier.errors > before:
            at.append(tier.now)
        tier.now += 0.5
    assert [round(later - earlier) for earlier, later in itertools.pairwise(at)][:7] == [1, 2, 4, 8, 16, 32, 60]
    assert tier.has(1), "it is read from all the while"
    files.failing = set()
    tier.now += 61
    assert tier.keep(3) == [digest_of(3)]
    files.failing = {"write"}
    tier.keep(4)
    files.failing = set()
    tier.now += 1.1
    assert tier.keep(5) == [digest_of(5)]
