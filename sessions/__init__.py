"""Who is talking, and what was said so far: session identity, ledgers of exact token ids, and where they are kept.

    identity.py       which session a request belongs to
    digests.py        names of messages: one of every byte, one of what an assistant message means
    ledger.py         a conversation as the engine saw it: token ids, block hashes, where every message ends
    continuation.py   what a turn takes over from a ledger, and where the two part
    records.py        a session: its ledgers, one for each branch, and its totals
    store.py          where records are kept: the protocol; memory_store.py: in this process, bounded by bytes
    codec.py          a record as bytes; redis_store.py: records in Redis (redis_link.py, redis_scripts.py); shared.py: both
    gaps/             how long sessions are away, by the tool they called
    explain/          why a turn reused less than its predecessor left
    nonces.py         what clients put in prompts and change with every request

It imports only prefix_cache. Rendering and tokenising stand in the gateway (gateway/histories).
"""
