"""kill -9 of processes that use the tiers, at random instructions, while a sibling goes on."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

from offload.slot_layout import FREE, H_REBUILT, H_RECLAIMED, WRITING
from tests.offload.killed_worker import SLOTS, one_round, open_tiers, work


def kill_some(directory: Path, kills: int, seed: int) -> tuple[int, int, int]:
    """Returns blocks that were right, tables that had to be rebuilt, slots that dead processes had held."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.offload.killed_worker"])
    chance = random.Random(seed)
    tiers = open_tiers(directory)
    right = 0
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
            right += one_round(tiers, chance)
            for tier in tiers:
                tier.check_integrity()
                assert tier.table.count(WRITING) == 0, "a slot is lost"
                assert tier.table.count() + tier.table.count(FREE) == SLOTS
        rebuilt = sum(tier.table.counter(H_REBUILT) for tier in tiers)
        return right, rebuilt, sum(tier.table.counter(H_RECLAIMED) for tier in tiers)
    finally:
        for tier in tiers:
            tier.close()


def test_two_hundred_kills_lose_nothing_and_siblings_read_nothing_wrong(tmp_path: Path) -> None:
    right, rebuilt, reclaimed = kill_some(tmp_path, kills=200, seed=7)
    assert right > 1000
    assert rebuilt + reclaimed > 0, "kills that hit nobody at work test nothing"


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
