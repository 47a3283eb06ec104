"""Sessions that outlive the gateway in a file, which is closed, killed, damaged, bounded and taken away meanwhile."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import sqlite3
import stat
import time

import msgspec
import pytest

from sessions.digests import message_digests, prefix_names
from sessions.file_store import FileLedgerStore, SessionFileError
from sessions.memory_store import MemoryLedgerStore
from tests.sessions.ledgers import a_ledger, a_record

BOUND = 10**7


@pytest.fixture
async def gateway(tmp_path):
    """Makes a store of the file; one at a time has it."""
    made = []

    def make(max_bytes=BOUND, memory=BOUND, directory=tmp_path / "sessions"):
        made.append(FileLedgerStore(MemoryLedgerStore(memory), directory, max_bytes))
        return made[-1]

    yield make
    for store in made:
        with contextlib.suppress(RuntimeError):
            await store.aclose()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.01)


async def written(store):
    await until(lambda: not store._unsaved)


def a_session(tenant, key, version=1):
    """A record of a conversation of its own, used just now."""
    ledger = a_ledger([f"{tenant} {key} {number}" for number in range(3)], generated=(1,))
    return msgspec.structs.replace(a_record(key, ledger, tenant=tenant, version=version), used_at=time.time())


def next_of(record):
    return msgspec.structs.replace(record, version=record.version + 1, turns=record.turns + 1)


async def test_a_record_is_there_after_a_restart_and_goes_on(gateway):
    first = gateway()
    record = a_session("alice", "s", version=1)
    assert await first.put(record)
    assert await first.put(next_of(record))
    await first.aclose()
    again = gateway()
    assert await again.peek("alice", "s") is None, "nothing is read before it is asked for"
    got = await again.get("alice", "s")
    assert got == next_of(record)
    assert again.events["restored"] == 1
    assert await again.get("bob", "s") is None
    assert not await again.put(record), "an older version"
    assert await again.put(next_of(got))
    await again.aclose()
    assert (await gateway().get("alice", "s")).version == 3


async def test_who_names_no_session_is_recognised_after_a_restart(gateway):
    messages = [{"role": "user", "content": f"m{number}"} for number in range(4)]
    names = prefix_names(message_digests(messages), b"context")
    record = a_session("alice", "auto", version=1)
    assert record.prefix_names()
    store = gateway()
    await store.put(record)
    await store.aclose()
    again = gateway()
    own = record.prefix_names()
    assert await again.recognise("alice", [*names, own[0]]) == "auto"
    assert await again.recognise("bob", own) is None
    assert await again.recognise("alice", names) is None
    assert await again.delete("alice", "auto")
    assert await again.recognise("alice", own) is None


async def test_a_deleted_session_is_gone_for_good(gateway):
    store = gateway()
    await store.put(a_session("alice", "s", version=1))
    await store.aclose()
    again = gateway()
    assert await again.delete("alice", "s")
    assert await again.get("alice", "s") is None
    assert not await again.delete("alice", "s")
    # A turn that began before the deletion does not undo it.
    assert not await again.put(a_session("alice", "s", version=2))
    await again.aclose()
    assert await gateway().get("alice", "s") is None


async def test_memory_that_is_too_small_is_filled_from_the_file(gateway):
    records = [a_session("alice", f"s{number}", version=1) for number in range(8)]
    store = gateway(memory=2 * records[0].nbytes + 10)
    for record in records:
        assert await store.put(record)
    await written(store)
    assert store.stats().sessions == 2
    for record in records:
        assert await store.get("alice", record.key) == record
    page = await store.page("alice", after=None, limit=5)
    assert [record.key for record in page.records] == [f"s{number}" for number in range(5)]
    rest = await store.page("alice", after=page.after, limit=5)
    assert [record.key for record in rest.records] == ["s5", "s6", "s7"]
    assert rest.after is None
    assert (await store.page("bob", after=None, limit=5)).records == ()


async def test_the_file_is_bounded_and_what_was_used_longest_ago_goes(gateway, tmp_path):
    store = gateway(max_bytes=4000)
    for number in range(50):
        await store.put(msgspec.structs.replace(a_session("alice", f"s{number:02}", version=1), used_at=2e9 + number))
        await written(store)
    await store.aclose()
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions" / "turnkeep-sessions-1.sqlite")) as database:
        keys = [key for (key,) in database.execute("SELECT key FROM sessions ORDER BY key")]
        (size,) = database.execute("SELECT SUM(bytes) FROM sessions").fetchone()
        (orphans,) = database.execute("SELECT COUNT(*) FROM names WHERE key NOT IN (SELECT key FROM sessions)").fetchone()
    assert 0 < size <= 4000
    assert keys == [f"s{number:02}" for number in range(50 - len(keys), 50)]
    assert orphans == 0


async def test_sessions_that_nobody_used_for_two_weeks_go(gateway):
    store = gateway()
    await store.put(msgspec.structs.replace(a_session("alice", "old", version=1), used_at=1.0))
    await store.put(msgspec.structs.replace(a_session("alice", "new", version=1), used_at=4e9))
    await store.aclose()
    again = gateway()
    assert await again.get("alice", "old") is None
    assert await again.get("alice", "new") is not None


def put_until_killed(directory, said):
    async def work():
        store = FileLedgerStore(MemoryLedgerStore(BOUND), directory, BOUND)
        record = a_session("alice", "s", version=1)
        while True:
            await store.put(record)
            await written(store)
            said.value = record.version
            record = next_of(record)

    asyncio.run(work())


async def test_a_kill_at_any_moment_loses_no_turn_that_was_written(gateway, tmp_path):
    context = multiprocessing.get_context("forkserver")
    for _ in range(4):
        said = context.Value("q", 0)
        child = context.Process(target=put_until_killed, args=(tmp_path / "killed", said))
        child.start()
        while said.value < 20:
            await asyncio.sleep(0.005)
            assert child.is_alive()
        child.kill()
        child.join()
        store = gateway(directory=tmp_path / "killed")
        assert (await store.get("alice", "s")).version >= said.value
        await store.delete("alice", "s")
        await store.aclose()


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 5000])
async def test_a_file_that_is_none_is_put_aside_and_begun_anew(gateway, tmp_path, caplog, content):
    place = tmp_path / "sessions"
    place.mkdir()
    (place / "turnkeep-sessions-1.sqlite").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        store = gateway()
    assert "is damaged (" in caplog.text
    assert (place / "turnkeep-sessions-1.damaged").read_bytes() == content
    assert await store.put(a_session("alice", "s", version=1))
    await store.aclose()
    assert await gateway().get("alice", "s") is not None


async def test_a_damaged_record_is_ignored_and_counted(gateway, tmp_path, caplog):
    store = gateway()
    await store.put(a_session("alice", "s", version=1))
    await store.aclose()
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions" / "turnkeep-sessions-1.sqlite")) as database, database:
        (data,) = database.execute("SELECT data FROM sessions").fetchone()
        database.execute("UPDATE sessions SET data = ?", (data[:-3] + bytes((data[-3] ^ 1,)) + data[-2:],))
    again = gateway()
    assert await again.get("alice", "s") is None
    assert again.events["corrupt"] == 1
    assert "is ignored" in caplog.text
    assert await again.put(a_session("alice", "s", version=1))


async def test_what_another_version_left_is_named_and_a_second_gateway_is_told(gateway, tmp_path, caplog):
    place = tmp_path / "sessions"
    place.mkdir()
    (place / "turnkeep-sessions-0.sqlite").write_bytes(b"old")
    with caplog.at_level(logging.WARNING):
        store = gateway()
    assert "turnkeep-sessions-0.sqlite is of another version and is not read" in caplog.text
    await store.put(a_session("alice", "s", version=1))
    await written(store)
    with pytest.raises(SessionFileError, match="is used by another gateway; give each a directory of its own"):
        gateway()
    assert stat.S_IMODE(os.stat(place / "turnkeep-sessions-1.sqlite").st_mode) == 0o600
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionFileError, match="cannot be used for sessions: "):
        gateway(directory=tmp_path / "file")


async def test_a_file_that_cannot_be_written_costs_nobody_a_turn_and_is_caught_up_with(gateway, monkeypatch, caplog):
    monkeypatch.setattr("sessions.file_store._RETRY", 0.05)
    store = gateway()
    await store.put(a_session("alice", "s", version=1))
    await written(store)
    write = store._file.write

    def full(changes):
        raise sqlite3.OperationalError("database or disk is full")

    store._file.write = full
    for version in range(2, 5):
        assert await store.put(a_session("alice", "s", version=version))
    await until(lambda: store.events["failed"])
    assert (await store.get("alice", "s")).version == 4
    assert "database or disk is full" in caplog.text
    store._file.write = write
    await written(store)
    await store.aclose()
    assert (await gateway().get("alice", "s")).version == 4
