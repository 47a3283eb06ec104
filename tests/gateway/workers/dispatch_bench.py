"""A dispatcher over fake replicas."""

from fake_replica import FakeReplica, until

from gateway.dispatch import PoolConfig, PoolDispatcher
from gateway.turn import Prompt, SessionRef
from gateway.workers.protocol import SamplingParams
from prefix_cache.hashing import block_digests, pack_tokens
from prefix_cache.packed_tokens import PackedTokens

ROOT = bytes(16)


class Bench:
    """A dispatcher over fake replicas."""

    def __init__(self, tmp_path, **config):
        self.tmp_path = tmp_path
        self.replicas = {}
        settings = {"poll_interval": 0.02, "probe_timeout": 0.5, "unresponsive_after": 0.3} | config
        self.dispatcher = PoolDispatcher(PoolConfig(**settings))

    async def add(self, name, ready=True, **fields):
        replica = self.replicas[name] = FakeReplica(**fields)
        url = await replica.start(self.tmp_path / f"{name}-{len(self.replicas)}-{id(replica)}.sock")
        self.dispatcher.add_worker(name, url)
        if ready:
            await until(lambda: self.state(name) == "ready")
            await until(lambda: self.dispatcher.index.position(name) is not None)
        return replica

    def state(self, name):
        return next((view.state for view in self.dispatcher.workers() if view.name == name), None)

    def view(self, name):
        return next(view for view in self.dispatcher.workers() if view.name == name)

    async def send(self, request_id="r", tokens=range(40), session="s", model="m", known_as=None, whole=False, **kwargs):
        prompt = Prompt(PackedTokens(pack_tokens(tokens)), tuple(block_digests(list(tokens), ROOT, 4)))
        return await self.dispatcher.dispatch(
            request_id=request_id,
            model=model,
            session=SessionRef("t", session),
            prompt=prompt,
            sampling=SamplingParams(**kwargs),
            priority=0,
            trace_headers={"traceparent": "tp"},
            known_as=known_as,
            whole=whole,
        )

    def books_are_empty(self):
        return all(view.in_flight == 0 and view.queued_tokens == 0 for view in self.dispatcher.workers())

    async def close(self):
        await self.dispatcher.__aexit__()
        for replica in self.replicas.values():
            replica.frozen = False
            await replica.stop()


async def everything(generation):
    return [chunk async for chunk in generation.chunks()]
