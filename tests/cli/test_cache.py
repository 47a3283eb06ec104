"""`turnkeep cache` on tiers that are there, in use and not."""

import json
import os
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from cli import cache
from offload.arena import HostArena
from offload.disk_store import DiskStore
from offload.inspection import held_tiers
from offload.remote_store import RemoteStore
from tests.offload.blocks import digest_of, outgoing
from tests.redis_server import redis_server

KEY = digest_of(1)
BLOCK = 4096


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(directory, a function that runs the command): ten blocks in an arena and eight on disk, nobody uses them."""
    tables, directory = tmp_path / "shm", tmp_path / "disk"
    tables.mkdir()
    monkeypatch.setattr(cache, "held_tiers", lambda given: held_tiers(given, tables))
    arena = HostArena(KEY, BLOCK, 16 * BLOCK, tables)
    arena.store([outgoing(number, BLOCK) for number in range(10)])
    arena.table.close(keep=True)
    disk = DiskStore(directory, KEY, BLOCK, 20 * (BLOCK + 64), min_free=0, model="tiny", codec="raw")
    disk.store([outgoing(number, BLOCK) for number in range(8)])
    disk.close()

    def run(*arguments: str, code: int = 0, text: str | None = None) -> str:
        result = CliRunner().invoke(cache.command, [*arguments, "--disk-kv-dir", str(directory)], input=text)
        assert result.exit_code == code, result.output
        return result.output

    return directory, tables, run


def test_it_shows_what_there_is_and_changes_nothing(kept):
    _, _, run = kept
    for _ in range(2):
        shown = json.loads(run("show", "--json"))
        told = [(each["tier"], each["key"], each["blocks"], each["used_bytes"], each["in_use"]) for each in shown]
        assert told == [("host", KEY.hex(), 10, 10 * BLOCK, False), ("disk", KEY.hex(), 8, 8 * BLOCK, False)]
        assert shown[0]["model"] == "tiny", "known from the disk"
        assert (shown[1]["model"], shown[1]["max_bytes"]) == ("tiny", 20 * (BLOCK + 64))
    text = run("show")
    assert "tiny raw" in text
    assert KEY.hex()[:12] in text


def test_it_finds_damage_and_says_so_with_its_exit_code(kept):
    directory, _, run = kept
    assert "disk " + KEY.hex()[:12] + ": 8 blocks are sound, 0 were damaged" in run("verify")
    data = directory / "turnkeep-kv-2" / KEY.hex() / "data"
    with data.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\x00\xff\x00")
    assert "7 blocks are sound, 1 were damaged and are gone." in run("verify", code=1)
    assert "7 blocks are sound, 0 were damaged" in run("verify")
    assert [each["blocks"] for each in json.loads(run("show", "--json"))] == [10, 7]


def test_it_trims_to_a_size_or_a_share_and_gives_the_disk_back(kept):
    directory, _, run = kept
    data = directory / "turnkeep-kv-2" / KEY.hex() / "data"
    os.sync()
    before = data.stat().st_blocks
    assert "host" in run("trim", "--to", "50%")
    assert [each["blocks"] for each in json.loads(run("show", "--json"))] == [5, 4]
    assert data.stat().st_blocks <= before - 4 * BLOCK // 512
    run("trim", "--to", "4096")
    assert [each["blocks"] for each in json.loads(run("show", "--json"))] == [1, 1]


def test_it_asks_before_it_clears(kept):
    _, tables, run = kept
    assert "Give up all blocks of 2 tiers?" in run("clear", text="n\n", code=1)
    assert [each["blocks"] for each in json.loads(run("show", "--json"))] == [10, 8]
    run("clear", "--yes")
    shown = json.loads(run("show", "--json"))
    assert [(each["tier"], each["blocks"]) for each in shown] == [("disk", 0)]
    assert list(tables.glob("*-host-*")) == [], "an arena that nobody uses and that holds nothing is gone"


def test_what_is_in_use_stays_in_use(kept):
    _, tables, run = kept
    arena = HostArena(KEY, BLOCK, 16 * BLOCK, tables)
    try:
        assert [each["in_use"] for each in json.loads(run("show", "--json"))] == [True, False]
        run("clear", "--yes")
        assert arena.figures().blocks == 0
        assert arena.store([outgoing(1, BLOCK)]) == [digest_of(1)]
        assert json.loads(run("show", "--json"))[0]["blocks"] == 1
    finally:
        arena.close()


def test_a_key_that_is_not_there_is_said(kept):
    _, _, run = kept
    assert "There is nothing of that kind" in run("verify", "--key", "ffff", code=1)
    assert "8 blocks" in run("verify", "--key", KEY.hex()[:6])


def test_a_file_that_is_no_arena_is_named_and_stops_nobody(kept):
    _, tables, run = kept
    broken = tables / f"turnkeep-{os.getuid()}-host-{digest_of(5).hex()}"
    for content in (b"", b"x" * 40, b"x" * 5000):
        broken.write_bytes(content)
        shown = {each["key"]: each for each in json.loads(run("show", "--json"))}
        assert shown[digest_of(5).hex()]["model"] == "(damaged, or of another version)"
        assert shown[KEY.hex()]["blocks"] in (8, 10)
        assert "remove it when nothing uses it." in run("verify", "--key", digest_of(5).hex(), code=1)


def test_records_that_are_gone_leave_nothing_to_show(kept):
    directory, _, run = kept
    (directory / "turnkeep-kv-2" / KEY.hex() / "records").unlink()
    assert [each["blocks"] for each in json.loads(run("show", "--json"))] == [10, 0]
    assert "0 blocks are sound" in run("verify")


@pytest.fixture
def far(kept):
    """(a client of a Redis with two kinds of blocks in it, its server)."""
    with redis_server() as server, redis.Redis(port=server.port) as client:
        assert in_redis(server) == {}
        for key, count in ((digest_of(1), 10), (digest_of(2), 6)):
            store = RemoteStore(server.url, key, BLOCK, 16 * (BLOCK + 8), model="tiny", codec="int8")
            store.refresh()
            store.store([outgoing(number, BLOCK, depth=number) for number in range(count)])
            store.close()
        yield client, server


def run_with(server, *arguments, code=0):
    result = CliRunner().invoke(cache.command, [*arguments, "--remote-kv", server.url])
    assert result.exit_code == code, result.output
    return result.output


def in_redis(server):
    shown = json.loads(run_with(server, "show", "--json"))
    return {each["key"]: each for each in shown if each["tier"] == "remote"}


def test_it_looks_after_redis_too(far):
    client, server = far
    one, two = digest_of(1).hex(), digest_of(2).hex()
    shown = in_redis(server)
    assert {key: each["blocks"] for key, each in shown.items()} == {one: 10, two: 6}
    assert shown[one]["used_bytes"] == 10 * (BLOCK + 8)
    assert shown[one]["max_bytes"] == 16 * (BLOCK + 8)
    assert (shown[one]["model"], shown[one]["codec"], shown[one]["in_use"]) == ("tiny", "int8", True)
    assert shown[one]["place"] == f"127.0.0.1:{server.port}/0"
    assert f"remote {one[:12]}: 10 blocks are sound, 0 were damaged" in run_with(server, "verify", "--key", one)
    prefix = b"turnkeep:kv:2:{" + one.encode() + b"}:"
    client.setrange(prefix + digest_of(3), 50, b"\x00\xff\x00")
    client.delete(prefix + digest_of(4))
    assert f"remote {one[:12]}: 8 blocks are sound, 1 were damaged and are gone." in run_with(
        server, "verify", "--key", one, code=1
    )
    assert "8 blocks are sound, 0 were damaged" in run_with(server, "verify", "--key", one)
    assert client.hget(prefix + b"about", "healed") == b"1"
    run_with(server, "trim", "--to", "50%")
    assert {key: each["blocks"] for key, each in in_redis(server).items()} == {one: 4, two: 3}
    run_with(server, "trim", "--to", "5000", "--key", one)
    assert {key: each["blocks"] for key, each in in_redis(server).items()} == {one: 1, two: 3}
    run_with(server, "clear", "--yes", "--key", two)
    assert {key: each["blocks"] for key, each in in_redis(server).items()} == {one: 1, two: 0}
    assert client.keys(b"turnkeep:kv:2:{" + two.encode() + b"}:*") == [b"turnkeep:kv:2:{" + two.encode() + b"}:about"]
    # Once nobody uses it, nothing stays.
    client.hset(b"turnkeep:kv:2:{" + two.encode() + b"}:about", "seen", 1)
    run_with(server, "clear", "--yes", "--key", two)
    assert two not in in_redis(server)
    assert client.keys(b"turnkeep:kv:2:{" + two.encode() + b"}:*") == []


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "nonsense", "http://127.0.0.1"])
def test_a_redis_that_is_not_there_is_said(kept, url):
    for command in (["show"], ["verify"], ["trim", "--to", "1GiB"], ["clear", "--yes"]):
        result = CliRunner().invoke(cache.command, [*command, "--remote-kv", url])
        assert result.exit_code == 1
        assert "--remote-kv: " in result.output
