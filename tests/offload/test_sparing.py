"""Stores beside steps: they take little while one runs, and do not fall behind."""

import time
from pathlib import Path

import numpy as np
import pytest
from blocks import digest_of

from engine.kv_bytes import HostKV
from offload import transfers
from offload.arena import HostArena
from offload.codecs import BlockShape
from offload.estimate import TransferCost
from offload.guard import GuardedTier
from offload.transfers import Filled, Transfers

COUNT = 40


@pytest.fixture
def moving(tmp_path: Path, monkeypatch):
    """A host tier beside a pool of 3,200 blocks, a store of which is waited after for a minute while a step runs."""
    import torch

    monkeypatch.setattr(transfers, "_STORE_SHARE", 1e-9)
    monkeypatch.setattr(transfers, "_LONGEST_SPARING", 60.0)
    shape = BlockShape(16, 32, "float32")
    kv = torch.arange(400 * 16 * 32, dtype=torch.float32).view(400, 16, 32)
    tier = GuardedTier(HostArena(b"k" * 16, 16 * 32 * 4, 8 << 20, tmp_path), TransferCost(1e-4))
    moving = Transfers((tier,), HostKV(kv), [0] * 3200, "raw", shape, lambda: None)
    yield moving
    moving.computing(False)
    moving.close()
    tier.close()


def filled(count: int) -> list[Filled]:
    return [Filled(digest_of(number), number, 0, number) for number in range(count)]


def until(moving: Transfers, stored: int) -> None:
    deadline = time.monotonic() + 60
    while moving.counts.stored < stored:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_while_a_step_runs_a_block_is_stored_and_the_next_one_waits(moving):
    moving.computing(True)
    moving.store(filled(COUNT))
    until(moving, 1)
    time.sleep(0.1)
    assert moving.counts.stored == 1
    moving.computing(False)
    moving.store([])  # wakes it, as whatever comes next would
    assert moving.wait_idle(60)
    assert moving.counts.stored == COUNT


def test_when_too_many_wait_they_are_stored_all_the_same(moving):
    moving.computing(True)
    moving.store(filled(200))
    until(moving, 200 - 3200 // 64 - 16)
    moving.computing(False)
    moving.store([])
    assert moving.wait_idle(60)
    assert moving.counts.stored == 200
    assert moving.counts.dropped == 0
    copy = np.empty(16 * 32 * 4, dtype=np.uint8)
    assert moving.tiers[0].load(digest_of(7), copy)
    assert copy.view(np.float32)[0] == 7 * 16 * 32
