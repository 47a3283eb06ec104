"""What a cache of some size could have held at best, knowing the future.

The bound: Belady's MIN with bypass on the blocks of all prompts in the order in which they came, with one cache as large as all
replicas' together. A block counts as found if it is in the cache; whatever will be used last is given up first, also before
it is stored. MIN finds the most for blocks of one size (Mattson et al. 1970). No fleet of the same total can find more: a
fleet is a partition of that cache, whose blocks may be held twice; it finds a block only when all before it were found too;
and it must store what it computes while it computes it. So the bound may lie above what is possible, never below.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from prefix_cache.hashing import BlockHash

_NEVER = 1 << 60


def best_possible(prompts: Sequence[Sequence[BlockHash]], blocks: int) -> int:
    """Blocks that a cache of `blocks` finds at best, of the prompts' blocks in this order."""
    flat = [digest for prompt in prompts for digest in prompt]
    following = [_NEVER] * len(flat)
    seen: dict[BlockHash, int] = {}
    for position in range(len(flat) - 1, -1, -1):
        following[position] = seen.get(flat[position], _NEVER)
        seen[flat[position]] = position
    held: dict[BlockHash, int] = {}
    latest: list[tuple[int, BlockHash]] = []
    found = 0
    for position, digest in enumerate(flat):
        found += digest in held
        use = following[position]
        if use == _NEVER:
            held.pop(digest, None)
            continue
        held[digest] = use
        heapq.heappush(latest, (-use, digest))
        while len(held) > blocks:
            negative, victim = heapq.heappop(latest)
            if held.get(victim) == -negative:
                del held[victim]
    return found


def one_lru(prompts: Sequence[Sequence[BlockHash]], blocks: int) -> int:
    """Blocks that one cache of that size finds which gives up the least recently used: not a bound, but what a fleet of such
    caches loses by being a fleet."""
    held: OrderedDict[BlockHash, None] = OrderedDict()
    found = 0
    for prompt in prompts:
        for digest in prompt:
            if digest not in held:
                break
            found += 1
        for digest in reversed(list(prompt)):
            held[digest] = None
            held.move_to_end(digest)
        while len(held) > blocks:
            held.popitem(last=False)
    return found
