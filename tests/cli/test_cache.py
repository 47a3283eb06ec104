"""`turnkeep cache` on tiers that are there, in use and not."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli import cache
from offload.arena import HostArena
from offload.disk_store import DiskStore
from offload.inspection import held_tiers
from tests.offload.blocks import digest_of, outgoing

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
        assert (shown[1]["model"], shown[1]["max_bytes"]) == ("tiny", 20 * (BLOCK + 64))
    text = run("show")
    assert "tiny raw" in text
    assert KEY.hex()[:12] in text


def test_it_finds_damage_and_says_so_with_its_exit_code(kept):
    directory, _, run = kept
    assert "disk " + KEY.hex()[:12] + ": 8 blocks are sound, 0 were damaged" in run("verify")
    data = directory / "turnkeep-kv-1" / KEY.hex() / "data"
    with data.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\x00\xff\x00")
    assert "7 blocks are sound, 1 were damaged and are gone." in run("verify", code=1)
    assert "7 blocks are sound, 0 were damaged" in run("verify")
    assert [each["blocks"] for each in json.loads(run("show", "--json"))] == [10, 7]


def test_it_trims_to_a_size_or_a_share_and_gives_the_disk_back(kept):
    directory, _, run = kept
    data = directory / "turnkeep-kv-1" / KEY.hex() / "data"
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
