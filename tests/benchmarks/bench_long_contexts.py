"""What a replica's bookkeeping of a long context takes, beside its model: microseconds a block for each thing that is said of
all blocks of a session once or more in every turn, and milliseconds of a whole turn of a simulated replica.

    python tests/benchmarks/bench_long_contexts.py [--tokens 100000] [--sessions 8] [--json]

Each is set beside putting as many keys into a dict, measured in the same run: what the least thing in Python takes that is said
of each block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from engine.simulate import SimulatedEngine
from engine.simulation.clock import VirtualClock
from engine.simulation.config import SimulationConfig
from gateway.workers.protocol import GenerateRequest, RetentionHint, SamplingParams
from prefix_cache.block_pool import BlockPool
from prefix_cache.eviction import EvictionPolicy, LRUPolicy
from prefix_cache.expected_use import ExpectedUsePolicy
from prefix_cache.hashing import TOKEN_BYTES, JoinedDigests, joined_block_digests
from prefix_cache.worth import IDLE, WAITING

BLOCK = 16
TURNS = 30
NEW_TOKENS = 960


def pool_costs(policy: EvictionPolicy, tokens: int, sessions: int) -> dict[str, float]:
    """Microseconds a block, of one session among several in the pool."""
    blocks = tokens // BLOCK
    pool = BlockPool(blocks * sessions, BLOCK, policy)
    chance = np.random.default_rng(1)
    names = []
    for session in range(1, sessions + 1):
        packed = chance.integers(0, 1 << 16, tokens, dtype=np.uint32).tobytes()
        digests = JoinedDigests(joined_block_digests(packed, bytes(16), BLOCK))
        pool.free(pool.publish(pool.allocate(blocks), digests, bytes(16)))
        pool.mark(digests, IDLE, session=session)
        names.append(digests)
    seconds: dict[str, list[float]] = {"look up": [], "touch": [], "free": [], "mark idle": [], "mark waiting": []}
    for number in range(TURNS * sessions):
        session = number % sessions
        digests = names[session]
        at = [time.perf_counter()]
        found = pool.find(digests)
        at.append(time.perf_counter())
        pool.touch(found)
        at.append(time.perf_counter())
        pool.free(found)
        at.append(time.perf_counter())
        pool.mark(digests, IDLE, session=session + 1)
        at.append(time.perf_counter())
        pool.mark(digests, WAITING, expected=time.monotonic() + 100.0 + session, session=session + 1)
        at.append(time.perf_counter())
        if len(found) != blocks:
            raise AssertionError(f"{len(found)} of {blocks} blocks are there")
        for name, before, after in zip(seconds, at, at[1:], strict=False):
            seconds[name].append(after - before)
    pool.check_integrity()
    return {name: statistics.median(taken) / blocks * 1e6 for name, taken in seconds.items()}


def dict_cost(tokens: int) -> float:
    """Microseconds a key of putting as many keys into a dict as there are blocks."""
    keys = list(range(tokens // BLOCK))
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        dict.fromkeys(keys)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) / len(keys) * 1e6


def turn(tokens: int, sessions: int) -> dict[str, float]:
    """Milliseconds of a turn whose history is cached but for the last `NEW_TOKENS` tokens, with the hint that follows it."""
    config = SimulationConfig(
        num_blocks=(tokens + TURNS * NEW_TOKENS) // BLOCK * sessions, max_model_len=2 * tokens + TURNS * NEW_TOKENS
    )
    core = SimulatedEngine(config, clock=VirtualClock())
    chance = np.random.default_rng(2)
    prompts = [chance.integers(64, 90, tokens, dtype=np.uint32).tobytes() for _ in range(sessions)]
    parts: dict[str, list[float]] = {"prepare": [], "engine thread": []}
    for number in range(TURNS):
        for session, prompt in enumerate(prompts):
            name = f"s{session}"
            request = GenerateRequest(
                request_id=f"{name}-{number}", packed_token_ids=prompt, session=name, sampling=SamplingParams(max_tokens=4)
            )
            began = time.perf_counter()
            prepared = core.prepare(request)
            ready = time.perf_counter()
            core.add(prepared)
            while core.has_work():
                core.step()
            core.retain([RetentionHint(session=name, request_id=request.request_id, return_p50=2.0, return_p90=20.0)])
            core.take_events()
            if number:  # the first computes all of it
                parts["prepare"].append(ready - began)
                parts["engine thread"].append(time.perf_counter() - ready)
            grown = chance.integers(64, 90, NEW_TOKENS, dtype=np.uint32).tobytes()
            prompts[session] = (prompt + grown)[: (tokens + TURNS * NEW_TOKENS) * TOKEN_BYTES]
    core.check_integrity()
    return {name: statistics.median(seconds) * 1e3 for name, seconds in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="of each session")
    parser.add_argument("--sessions", type=int, default=8, help="that the pool holds")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    results = {
        "dict": {"put": dict_cost(arguments.tokens)},
        "expected use": pool_costs(ExpectedUsePolicy(), arguments.tokens, arguments.sessions),
        "plain LRU": pool_costs(LRUPolicy(), arguments.tokens, arguments.sessions),
        "turn": turn(arguments.tokens, arguments.sessions),
    }
    if arguments.json:
        print(json.dumps(results))
        return
    put = results["dict"]["put"]
    for part, values in results.items():
        for name, value in values.items():
            if part == "turn":
                print(f"{part:>13}  {name:<14} {value:8.2f} ms")
            else:
                print(f"{part:>13}  {name:<14} {value:8.3f} us a block {value / put:8.1f} times a dict's")


if __name__ == "__main__":
    main()
