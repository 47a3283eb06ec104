"""kill -9 of processes that use the tiers, at random instructions, while a sibling goes on."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from offload.slot_layout import FREE, H_EVICTED, H_REBUILT, H_RECLAIMED, WRITING
from tests.offload.killed_worker import DOINGS, SLOTS, doing, one_round, open_tiers, work


class Killed(NamedTuple):
    """right: blocks that were read. rebuilt: tables whose books were in the middle of a change. reclaimed: slots that dead
    processes had held. doing: in the middle of what they were killed."""

    right: int
    rebuilt: int
    reclaimed: int
    evicted: int
    doing: Counter[str]


def kill_some(directory: Path, kills: int, seed: int) -> Killed:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.offload.killed_worker"])
    chance = random.Random(seed)
    tiers = open_tiers(directory)
    right = 0
    killed_in: Counter[str] = Counter()
    does = doing(directory)
    try:
        for number in range(kills):
            started = context.Event()
            child = context.Process(target=work, args=(str(directory), seed + number, started))
            child.start()
            assert started.wait(60)
            deadline = time.monotonic() + chance.uniform(0.0, 0.03)
            while time.monotonic() < deadline:
                right += one_round(tiers, chance)
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            assert child.exitcode == -signal.SIGKILL, "it found a wrong block before it was killed"
            killed_in[DOINGS[does[0]]] += 1
            right += one_round(tiers, chance)
            for tier in tiers:
                tier.check_integrity()
                assert tier.table.count(WRITING) == 0, "a slot is lost"
                assert tier.table.count() + tier.table.count(FREE) == SLOTS
        rebuilt, reclaimed, evicted = (
            sum(tier.table.counter(word) for tier in tiers) for word in (H_REBUILT, H_RECLAIMED, H_EVICTED)
        )
        return Killed(right, rebuilt, reclaimed, evicted, killed_in)
    finally:
        for tier in tiers:
            tier.close()


def test_two_hundred_kills_lose_nothing_and_siblings_read_nothing_wrong(tmp_path: Path) -> None:
    killed = kill_some(tmp_path, kills=200, seed=7)
    assert killed.right > 1000
    assert killed.evicted > 1000
    assert killed.doing.total() == 200
    # Kills that hit nobody at work test nothing. A store makes room first: most evictions happen in it.
    assert min(killed.doing[what] for what in ("store", "evict", "load")) >= 5, killed.doing
    assert killed.rebuilt > 0
    assert killed.reclaimed > 0


def test_after_a_kill_of_all_the_next_one_finds_both_tiers_whole(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    for seed in range(4):
        started = context.Event()
        children = [context.Process(target=work, args=(str(tmp_path), 10 * seed + n, started)) for n in range(2)]
        for child in children:
            child.start()
        assert started.wait(60)
        time.sleep(0.05)
        for child in children:
            child.kill()
        for child in children:
            child.join()
        tiers = open_tiers(tmp_path)
        try:
            for tier in tiers:
                tier.check_integrity()
                assert tier.table.count(WRITING) == 0
                assert tier.table.count() > 0
            assert one_round(tiers, random.Random(seed)) >= 0
        finally:
            for tier in tiers:
                tier.table.close(keep=True)
    tiers = open_tiers(tmp_path)
    for tier in tiers:
        tier.close()
    assert list((tmp_path / "tables").iterdir()) == []
