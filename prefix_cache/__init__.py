"""Which tokens' keys and values exist, where, and under what name.

This room names blocks (`hashing`), keeps the books of a fixed pool of them (`block_pool`, `eviction`), tells others what
changed (`events`) and answers which worker holds a prefix (`index`). It imports no other room.
"""
