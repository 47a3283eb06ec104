"""Loaders: where they run."""

import os
import threading
import time
from pathlib import Path

import pytest

from engine.kv_bytes import HostKV
from offload.arena import HostArena
from offload.codecs import BlockShape
from offload.estimate import TransferCost
from offload.guard import GuardedTier
from offload.tickets import LANES
from offload.transfers import Transfers


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be told where to run here")
def test_loaders_do_not_share_a_processor(tmp_path: Path):
    import torch

    mine = os.sched_getaffinity(0)
    if len(mine) < LANES:
        pytest.skip("there are fewer processors than loaders")
    before = {thread.ident for thread in threading.enumerate()}
    shape = BlockShape(16, 32, "float32")
    tier = GuardedTier(HostArena(b"k" * 16, 16 * 32 * 4, 1 << 20, tmp_path), TransferCost(1e-4))
    moving = Transfers((tier,), HostKV(torch.zeros(4, 16, 32)), [0] * 4, "raw", shape, lambda: None)
    try:
        threads = [thread for thread in threading.enumerate() if thread.ident not in before]
        loaders = [thread.native_id for thread in threads if thread.name == "kv-load"]
        others = [thread.native_id for thread in threads if thread.name != "kv-load"]
        deadline = time.monotonic() + 60
        while True:
            places = [os.sched_getaffinity(loader or 0) for loader in loaders]
            if sum(map(len, places)) == len(mine) and set().union(*places) == mine:
                break  # each processor is one loader's
            assert time.monotonic() < deadline, places
            time.sleep(0.005)
        assert len(places) == LANES
        assert all(os.sched_getaffinity(other or 0) == mine for other in others)
        assert os.sched_getaffinity(0) == mine
    finally:
        moving.close()
        tier.close()
