"""A router over workers that compute what they are given and tell the index at once."""

import random
from dataclasses import replace

from gateway.router.config import RouterConfig
from gateway.router.costs import WorkerLoad
from gateway.router.router import Router
from gateway.turn import SessionRef
from prefix_cache.events import BlocksStored, EventBatch, Snapshot
from prefix_cache.hashing import block_digests, join_digests
from prefix_cache.index import ResidencyIndex

ROOT = bytes(16)


BLOCK = 16


class Cluster:
    """A router over workers that compute what they are given and tell the index at once."""

    def __init__(self, names, **config):
        self.now = 0.0
        settings = RouterConfig(**config)
        self.index = ResidencyIndex(settings.max_indexed_blocks, settings.max_predicted_blocks)
        self.router = Router(settings, self.index, lambda: self.now)
        self.loads = {name: WorkerLoad(name, max_concurrency=64) for name in names}
        self.sequence = dict.fromkeys(names, 0)
        for name in names:
            self.index.apply(name, Snapshot("i", 0, {}))

    def route(self, tokens, session=None, exclude=()):
        return self.router.route(
            digests=block_digests(tokens, ROOT, BLOCK),
            prompt_tokens=len(tokens),
            block_size=BLOCK,
            session=SessionRef("t", session),
            loads=[load for name, load in self.loads.items() if name not in exclude],
        )

    def store(self, name, tokens):
        self.sequence[name] += 1
        digests = join_digests(block_digests(tokens, ROOT, BLOCK))
        self.index.apply(name, EventBatch("i", self.sequence[name], (BlocksStored(digests, ROOT),)))

    def run(self, tokens, session=None):
        """A whole turn, nothing beside it."""
        route = self.route(tokens, session)
        route.computed(route.receipt.matched_tokens)
        route.finished()
        self.store(route.receipt.worker, tokens)
        return route.receipt

    def busy(self, name, queued=0, requests=0):
        self.loads[name] = replace(self.loads[name], queued_tokens=queued, requests=requests)


def tokens(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]
