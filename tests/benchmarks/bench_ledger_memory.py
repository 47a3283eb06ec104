"""What ledgers take in memory: bytes a token, and many idle sessions.

    python tests/benchmarks/bench_ledger_memory.py [--sessions 100000] [--tokens 1200] [--messages 8] [--json]

Fills a MemoryLedgerStore without a bound with sessions of random ids, and measures the resident set of this process. Then one
conversation of 100k tokens and 200 messages, and a store with the default bound that gets more than it may hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import os

import psutil

from gateway.config import SessionsConfig
from prefix_cache.hashing import iter_block_digests
from prefix_cache.packed_tokens import PackedTokens
from sessions.ledger import Ledger, Span, pack_spans
from sessions.memory_store import MemoryLedgerStore
from sessions.records import SessionRecord


def make(key: str, tokens: int, messages: int) -> SessionRecord:
    ids = os.urandom(4 * tokens)
    each = tokens // messages
    spans = [Span(at + 1, (at + 1) * each, (at + 1) * each * 4, at) for at in range(messages)]
    ledger = Ledger(
        context=os.urandom(16),
        root=bytes(16),
        block_size=16,
        messages=os.urandom(16 * messages),
        spans=pack_spans(spans),
        tokens=PackedTokens(ids),
        blocks=b"".join(iter_block_digests(ids, bytes(16), 16)),
        tail="<|im_start|>assistant\n",
        worker="replica-0",
    )
    return SessionRecord(tenant="t", key=key, model="m", branches=(ledger,))


async def measure(sessions: int, tokens: int, messages: int) -> dict[str, float]:
    process = psutil.Process()
    store = MemoryLedgerStore(2**40)
    gc.collect()
    before = process.memory_info().rss
    for number in range(sessions):
        await store.put(make(f"session-{number:08d}", tokens, messages))
    gc.collect()
    used = process.memory_info().rss - before
    counted = store.stats().bytes
    large = make("large", 100_000, 200)
    bounded = MemoryLedgerStore(SessionsConfig().max_bytes)
    for number in range(1500):
        await bounded.put(make(f"l{number}", 100_000, 200))
    return {
        "sessions": sessions,
        "tokens_each": tokens,
        "resident_mib": used / 2**20,
        "resident_bytes_a_session": used / sessions,
        "resident_bytes_a_token": used / sessions / tokens,
        "counted_mib": counted / 2**20,
        "bytes_a_token_of_100k": large.nbytes / 100_000,
        "bounded_mib": bounded.stats().bytes / 2**20,
        "bounded_sessions": bounded.stats().sessions,
        "bounded_evicted": bounded.stats().evicted,
    }


def main() -> None:
    import asyncio

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--messages", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.sessions, arguments.tokens, arguments.messages))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>26}: {value:,.1f}")


if __name__ == "__main__":
    main()
