"""The shared table: against a dictionary, by several members, and when one of them dies in the middle of a change."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import slot_layout as layout
from offload.errors import TierCorrupt, TierUnavailable
from offload.shared_locks import ByteLocks
from offload.slot_layout import FREE, READY, WRITING
from offload.slot_table import SlotTable
from offload.table_file import remove_abandoned
from prefix_cache.hashing import JoinedDigests
from prefix_cache.worth import IDLE, PINNED, SHARED, SUPERSEDED, WAITING
from tests.offload.blocks import digest_of

KEY = digest_of(10**9)


def put(table: SlotTable, numbers: list[int], *, session: int = 0) -> int:
    places = table.reserve([digest_of(number) for number in numbers], depths=list(range(len(numbers))), session=session)
    return len(table.commit([(place, 64, number) for place, number in zip(places, numbers, strict=True) if place]))


def holds(table: SlotTable, number: int) -> bool:
    return table.find(digest_of(number)) is not None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(0, 1)), max_size=60))
def test_two_members_agree_with_a_dictionary(tmp_path_factory: pytest.TempPathFactory, actions: list) -> None:
    path = tmp_path_factory.mktemp("table") / "t"
    members = [SlotTable(path, KEY, 12, 64), SlotTable(path, KEY, 12, 64)]
    model: dict[int, int] = {}
    reserved: list = []
    for kind, number, who in actions:
        table = members[who]
        digest = digest_of(number)
        if kind == 0:
            (place,) = table.reserve([digest])
            if number in model:
                assert place is None
            elif place is not None:
                reserved.append((who, number, place))
        elif kind == 1 and reserved:
            who, number, place = reserved.pop(0)
            taken = members[who].commit([(place, number, number * 7)])
            assert bool(taken) == (number not in model)
            model.setdefault(number, number * 7)
        elif kind == 2 and reserved:
            who, number, place = reserved.pop()
            members[who].cancel([place])
        elif kind == 3:
            found = table.find(digest)
            assert bool(found) == bool(found and len(table.drop([found])))
            model.pop(number, None)
        elif kind == 4:
            assert table.mark([digest], number % 4) == (number in model)
        # Whatever was evicted for room is not in the model any more.
        model = {known: checksum for known, checksum in model.items() if holds(table, known)}
        for known in range(31):
            place = members[1 - who].find(digest_of(known))
            assert (place.checksum if place else None) == model.get(known)
        assert table.count() == len(model)
        assert table.count() + table.count(WRITING) + table.count(FREE) == 12
    for member in members:
        member.check_integrity()
        member.close()
    assert not path.exists()


def test_nothing_is_evicted_while_there_is_room(tmp_path: Path) -> None:
    table = SlotTable(tmp_path / "t", KEY, 8, 64)
    assert put(table, list(range(8))) == 8
    assert table.counter(layout.H_EVICTED) == 0
    assert put(table, [8, 9]) == 2
    assert table.count() == 8
    assert table.counter(layout.H_EVICTED) == 2


def test_superseded_go_first_then_idle_then_the_latest_return_then_shared(tmp_path: Path) -> None:
    table = SlotTable(tmp_path / "t", KEY, 6, 64)
    clock = [1000.0]
    table._now = lambda: clock[0]
    for number in range(6):
        clock[0] += 1
        put(table, [number])
    table.mark([digest_of(0)], SHARED)
    table.mark([digest_of(1)], WAITING, expected=clock[0] + 5)
    table.mark([digest_of(2)], WAITING, expected=clock[0] + 500)
    table.mark([digest_of(5)], SUPERSEDED)
    table.mark([digest_of(3)], PINNED, expected=clock[0] + 100)
    gone = []
    for number in range(10, 16):
        clock[0] += 0.1
        put(table, [number])
        table.mark([digest_of(number)], PINNED, expected=float("inf"))
        gone.extend(known for known in range(6) if known not in gone and not holds(table, known))
    assert gone == [5, 4, 2, 1, 0, 3]


def test_a_wait_that_is_long_over_counts_for_nothing(tmp_path: Path) -> None:
    table = SlotTable(tmp_path / "t", KEY, 2, 64)
    clock = [1000.0]
    table._now = lambda: clock[0]
    put(table, [0])
    table.mark([digest_of(0)], WAITING, expected=1010.0)
    clock[0] = 1021.0
    put(table, [1])
    put(table, [2])
    assert [holds(table, number) for number in (0, 1, 2)] == [False, True, True]


def test_the_tail_of_a_session_goes_before_its_head(tmp_path: Path) -> None:
    table = SlotTable(tmp_path / "t", KEY, 4, 64)
    put(table, [0, 1, 2, 3])
    put(table, [4, 5])
    assert [holds(table, number) for number in range(6)] == [True, True, False, False, True, True]


def test_a_block_of_two_sessions_is_shared_and_stays_that(tmp_path: Path) -> None:
    table = SlotTable(tmp_path / "t", KEY, 4, 64)
    put(table, [0, 1], session=7)
    table.mark([digest_of(0)], WAITING, expected=time.monotonic() + 9, session=8)
    table.mark([digest_of(1)], WAITING, expected=time.monotonic() + 9, session=7)
    slots = [table.find(digest_of(number)).slot for number in (0, 1)]
    assert [int(table.columns.standing[slot]) for slot in slots] == [SHARED, WAITING]
    table.mark([digest_of(0)], SUPERSEDED, session=8)
    assert int(table.columns.standing[slots[0]]) == SHARED
    table.mark([digest_of(1)], IDLE, session=7)
    assert int(table.columns.standing[slots[1]]) == IDLE


@pytest.mark.parametrize("cut_after", range(1, 14))
def test_a_change_that_breaks_off_anywhere_leaves_a_table_that_is_rebuilt(
    tmp_path: Path, cut_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every store to a column counts; the change dies after so many of them, with the lock taken back as by the kernel."""
    path = tmp_path / "t"
    dying, living = SlotTable(path, KEY, 4, 64), SlotTable(path, KEY, 4, 64)
    put(dying, [0, 1, 2, 3])

    class DiesError(Exception):
        pass

    left = [cut_after]

    class Counting:
        def __init__(self, view: memoryview) -> None:
            self._view = view

        def __getitem__(self, at: int) -> int:
            return self._view[at]

        def __setitem__(self, at: int, value: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise DiesError
            self._view[at] = value

    for name in ("at_heads", "at_next", "at_state", "at_low", "at_high", "at_generation", "at_length", "at_owner"):
        setattr(dying.columns, name, Counting(getattr(dying.columns, name)))
    with pytest.raises(DiesError):
        put(dying, list(range(4, 8)))
    dying.close()
    living.check_integrity()
    assert living.counter(layout.H_REBUILT) == 1
    assert living.count() + living.count(FREE) == 4
    assert put(living, [100, 101, 102, 103]) == 4
    assert [holds(living, number) for number in (100, 101, 102, 103)] == [True] * 4
    living.check_integrity()


def test_what_a_dead_member_had_begun_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "t"
    dead, living = SlotTable(path, KEY, 4, 64), SlotTable(path, KEY, 4, 64)
    places = dead.reserve([digest_of(number) for number in range(3)])
    assert put(living, [10, 11]) == 1  # one slot is left, and nothing to evict
    assert put(living, [12]) == 1
    dead.close()
    assert living.reclaim() == 3
    assert living.commit([(places[0], 64, 0)]) == []
    assert put(living, [20, 21, 22]) == 3
    living.check_integrity()


def test_a_new_member_with_a_dead_ones_number_does_not_inherit_its_slots(tmp_path: Path) -> None:
    path = tmp_path / "t"
    living, dead = SlotTable(path, KEY, 2, 64), SlotTable(path, KEY, 2, 64)
    dead.reserve([digest_of(1)])
    dead.close()
    again = SlotTable(path, KEY, 2, 64)
    assert again.member == dead.member
    assert again.count(WRITING) == 0
    assert put(living, [2, 3]) == 2


def test_a_table_that_all_have_left_is_gone_and_one_whose_users_died_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = SlotTable(path, KEY, 4, 64)
    put(table, [1])
    table.reserve([digest_of(2)])
    table.close(keep=True)  # what a kill leaves
    again = SlotTable(path, KEY, 4, 64)
    assert holds(again, 1)
    assert again.count(FREE) == 3
    again.check_integrity()
    again.close()
    assert not path.exists()


def test_another_key_size_or_layout_is_made_anew_when_nobody_uses_it_and_refused_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = SlotTable(path, KEY, 4, 64)
    put(table, [1])
    with pytest.raises(TierUnavailable, match="another version or model"):
        SlotTable(path, digest_of(5), 4, 64)
    sibling = SlotTable(path, KEY, 400, 64)
    assert sibling.slots == 4
    sibling.close()
    table.close(keep=True)
    other = SlotTable(path, digest_of(5), 4, 64)
    assert other.count() == 0
    other.close(keep=True)
    with path.open("r+b") as file:
        file.write(b"scribble")
    assert SlotTable(path, digest_of(5), 4, 64).count() == 0


def test_a_stopped_holder_of_the_lock_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "t"
    holder, other = SlotTable(path, KEY, 4, 64), SlotTable(path, KEY, 4, 64)
    put(holder, [1])
    with holder._changing():
        with pytest.raises(TierUnavailable, match="is it stopped"):
            put(other, [2])
        assert holds(other, 1)
    assert put(other, [2]) == 1


def test_check_integrity_can_fail(tmp_path: Path) -> None:
    table = SlotTable(tmp_path / "t", KEY, 4, 64)
    put(table, [1, 2])
    table.columns.header[layout.H_USED_BYTES] += 1
    with pytest.raises(TierCorrupt, match="bytes are used"):
        table.check_integrity()
    table.columns.header[layout.H_DIRTY] = 0
    table.columns.header[layout.H_USED_BYTES] -= 1
    table.columns.heads[:] = 0
    with pytest.raises(TierCorrupt, match="cannot be found"):
        table.check_integrity()
    table.columns.state[np.flatnonzero(table.columns.state == READY)] = FREE
    table.columns.header[layout.H_USED_BYTES] = 0
    table.columns.header[layout.H_DIRTY] = 0
    table.check_integrity()


def test_tables_that_killed_processes_left_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    left, used, fresh = (SlotTable(tmp_path / name, KEY, 4, 64) for name in ("kv-left", "kv-used", "kv-fresh"))
    left.close(keep=True)
    fresh.close(keep=True)
    for name in ("kv-left", "kv-used"):
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "other").write_text("not ours")
    os.utime(tmp_path / "other", (0, 0))
    assert remove_abandoned(tmp_path, "kv-", 3600.0) == [tmp_path / "kv-left"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv-fresh", "kv-used", "other"]
    assert put(used, [1]) == 1


def test_locks_of_others_are_counted_one_by_one(tmp_path):
    path = tmp_path / "locks"
    path.touch()
    numbers = [10, 11, 12, 30, 31, 99, 500]
    descriptors = [os.open(path, os.O_RDWR) for _ in (*numbers, None)]
    try:
        *holders, watcher = [ByteLocks(descriptor) for descriptor in descriptors]
        for holder, number in zip(holders, reversed(numbers), strict=True):
            assert holder.try_lock(number)
        assert holders[0].try_lock(31) is False
        assert watcher.count_held_elsewhere(10, 491) == 7
        assert watcher.count_held_elsewhere(11, 20) == 3
        assert watcher.count_held_elsewhere(13, 17) == 0
        assert holders[0].count_held_elsewhere(0, 1000) == 6, "its own is none of others"
        assert holders[1].try_lock(100)
        assert watcher.count_held_elsewhere(99, 2) == 2, "neighbours of one holder are two"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 150), unique=True, max_size=120),
    st.lists(
        st.tuples(st.lists(st.integers(0, 150), unique=True, max_size=140), st.integers(0, 4), st.integers(0, 2)), max_size=6
    ),
)
def test_many_blocks_at_once_are_each_block_by_itself(
    tmp_path_factory: pytest.TempPathFactory, there: list[int], marks: list
) -> None:
    # More blocks than buckets, so that chains are long.
    table = SlotTable(tmp_path_factory.mktemp("table") / "t", KEY, 120, 64)
    table.columns.buckets = 8
    put(table, there)
    worth = dict.fromkeys(there, (IDLE, 0.0, 0))
    for numbers, standing, session in marks:
        digests = [digest_of(number) for number in numbers]
        known = [number for number in numbers if holds(table, number)]
        assert set(known) == set(numbers) & set(there)
        for number in known:
            before, _, owner = worth[number]
            shared = before == SHARED or (session and owner and owner != session)
            now = SHARED if shared and standing != PINNED else standing
            worth[number] = (now, 9.0 if standing in (WAITING, PINNED) else 0.0, session or owner)
        assert table.mark(JoinedDigests(b"".join(digests)), standing, expected=9.0, session=session) == len(known)
        found = [holds(table, number) for number in numbers]
        assert table.prefix(digests) == (found.index(False) if False in found else len(found))
        assert list(table.lacking(digests)) == [digest_of(number) for number in numbers if number not in worth]
        for number, (now, expected, owner) in worth.items():
            slot = table.find(digest_of(number)).slot
            columns = table.columns
            assert (columns.at_standing[slot], columns.at_expected[slot], columns.at_session[slot]) == (now, expected, owner)
    table.close()


def test_many_blocks_of_a_damaged_table_are_missed_and_none_is_invented(tmp_path: Path) -> None:
    table = SlotTable(tmp_path / "t", KEY, 64, 64)
    put(table, list(range(40)))
    digests = [digest_of(number) for number in range(40)]
    slots = [table.find(digest).slot for digest in digests]
    table.columns.at_length[slots[0]] = 65
    table.columns.at_state[slots[1]] = WRITING
    table.columns.at_high[slots[2]] ^= 1
    table.columns.at_next[slots[3]] = slots[3] + 1  # a chain that bites its tail
    table.columns.at_next[slots[4]] = 1 << 31
    assert list(table.lacking(digests))[:3] == digests[:3]
    assert all(table.find(digest) is None for digest in table.lacking(digests))
    assert list(table.lacking([*digests, *(digest_of(number) for number in range(100, 200))]))[-100:] == [
        digest_of(number) for number in range(100, 200)
    ]
    table.close()
