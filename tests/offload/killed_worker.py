"""A process that stores and loads as fast as it can until it is killed."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from offload.arena import HostArena
from offload.disk_store import DiskStore
from tests.offload.blocks import digest_of, outgoing, payload_of

KEY = digest_of(10**9)
BLOCK = 3000
SLOTS = 24
BLOCKS = 60
DOINGS = ("store", "mark", "evict", "load")


def open_tiers(directory: Path) -> tuple[HostArena, DiskStore]:
    """The tiers that all of them share, much too small for what they store."""
    (directory / "tables").mkdir(exist_ok=True)
    arena = HostArena(KEY, BLOCK, SLOTS * 4096, directory / "tables")
    disk = DiskStore(directory / "disk", KEY, BLOCK, SLOTS * (4096 + 64), min_free=0, tables=directory / "tables")
    return arena, disk


def one_round(tiers: tuple[HostArena, DiskStore], chance: random.Random, say: Callable[[int], None] = lambda _: None) -> int:
    """Some changes and reads. Raises AssertionError for a block that is wrong; returns how many were right. `say` is told what
    is done next, an index of DOINGS."""
    right = 0
    into = np.empty(BLOCK, dtype=np.uint8)
    for tier in tiers:
        numbers = chance.sample(range(BLOCKS), 4)
        say(0)
        tier.store([outgoing(number, BLOCK, depth=at) for at, number in enumerate(numbers)])
        say(1)
        tier.mark([digest_of(chance.randrange(BLOCKS))], chance.randrange(4), session=chance.randrange(1, 5))
        say(2)
        tier.evict([digest_of(number) for number in chance.sample(range(BLOCKS), 4)])
        say(3)
        for number in chance.sample(range(BLOCKS), 8):
            if tier.load(digest_of(number), into):
                if not np.array_equal(into, payload_of(number, BLOCK)):
                    raise AssertionError(f"block {number} is wrong")
                right += 1
    return right


def doing(directory: Path) -> mmap.mmap:
    """A byte that says what the process does, and still does so when it is dead."""
    with (directory / "doing").open("a+b") as file:
        file.truncate(1)
        return mmap.mmap(file.fileno(), 1)


def work(directory: str, seed: int, started: Event) -> None:
    """Until it is killed; `started` is set once it has stored something."""
    tiers = open_tiers(Path(directory))
    chance = random.Random(seed)
    one_round(tiers, chance)
    does = doing(Path(directory))
    started.set()
    while True:
        one_round(tiers, chance, lambda what: does.__setitem__(0, what))
