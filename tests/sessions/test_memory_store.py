"""The store in memory: versions, bounds, recognition, pages, tenants."""

from __future__ import annotations

import pytest

from sessions.digests import message_digests, prefix_names
from sessions.memory_store import MemoryLedgerStore
from tests.sessions.ledgers import a_ledger, a_record


async def test_a_write_needs_the_version_before_it() -> None:
    store = MemoryLedgerStore(10**6)
    assert await store.put(a_record("s"))
    assert not await store.put(a_record("s"))
    assert await store.put(a_record("s", version=2))
    assert not await store.put(a_record("s", version=2))
    assert (await store.get("t", "s")).version == 2  # type: ignore[union-attr]
    assert await store.delete("t", "s")
    assert not await store.delete("t", "s")


async def test_what_began_before_a_deletion_does_not_undo_it() -> None:
    store = MemoryLedgerStore(10**6)
    assert store.epoch("t", "s") == ""
    await store.put(a_record("s"))
    assert await store.delete("t", "s")
    epoch = store.epoch("t", "s")
    assert epoch
    assert not await store.put(a_record("s", version=2))
    assert not await store.put(a_record("s"))
    assert await store.get("t", "s") is None
    # The name may be used again, by what knows of the deletion.
    assert await store.put(a_record("s", epoch=epoch))
    assert not await store.put(a_record("s", version=2))
    assert await store.put(a_record("s", version=2, epoch=epoch))
    assert await store.delete("t", "s")
    assert store.epoch("t", "s") not in ("", epoch)
    # Of what never was nothing is remembered.
    assert not await store.delete("t", "other")
    assert store.epoch("t", "other") == ""


async def test_what_was_dropped_for_the_bound_is_taken_as_it_is() -> None:
    store = MemoryLedgerStore(a_record("s").nbytes)
    await store.put(a_record("s"))
    await store.put(a_record("u"))
    assert await store.get("t", "s") is None
    assert await store.put(a_record("s", version=7))


async def test_the_least_recently_used_goes_first_and_the_bound_holds() -> None:
    one = a_record("a", a_ledger(["x"])).nbytes
    store = MemoryLedgerStore(3 * one)
    for key in "abc":
        await store.put(a_record(key, a_ledger([key])))
    await store.touch("t", "a")
    await store.put(a_record("d", a_ledger(["d"])))
    assert await store.get("t", "b") is None
    assert (await store.get("t", "a")) is not None
    stats = store.stats()
    assert (stats.sessions, stats.bytes, stats.evicted) == (3, 3 * one, 1)
    await store.put(a_record("e", a_ledger(["e" * 10] * 5000)))
    assert await store.get("t", "e") is None
    assert store.stats().sessions == 3


async def test_a_conversation_finds_the_longest_ledger_it_extends() -> None:
    store = MemoryLedgerStore(10**6)
    await store.put(a_record("short", a_ledger(["x"])))
    await store.put(a_record("long", a_ledger(["x", "y"])))

    def names(*texts: str) -> list[bytes]:
        return prefix_names(message_digests([{"role": "user", "content": text} for text in texts]), b"c" * 16)

    assert await store.recognise("t", names("x", "y", "z")) == "long"
    assert await store.recognise("t", names("x", "other")) == "short"
    assert await store.recognise("t", names("y")) is None
    assert await store.recognise("other tenant", names("x", "y", "z")) is None
    await store.delete("t", "long")
    assert await store.recognise("t", names("x", "y", "z")) == "short"


async def test_pages_follow_the_order_of_keys_within_a_tenant() -> None:
    store = MemoryLedgerStore(10**6)
    for key in ("b", "a", "d", "c"):
        await store.put(a_record(key))
    await store.put(a_record("foreign", tenant="u"))
    first = await store.page("t", after=None, limit=3)
    assert [record.key for record in first.records] == ["a", "b", "c"]
    second = await store.page("t", after=first.after, limit=3)
    assert [record.key for record in second.records] == ["d"]
    assert second.after is None


async def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        MemoryLedgerStore(0)
