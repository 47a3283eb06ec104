"""The workers of a gateway: which there are, which belong together, and which may take a turn now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway.turn import TurnError
from gateway.workers.base import CountsTrouble, Worker
from gateway.workers.foreign import adapter_namespace, foreign_namespace
from gateway.workers.member import Member, ProbeConfig, State
from gateway.workers.protocol import WorkerInfo
from gateway.workers.spec import WorkerSpec
from gateway.workers.tiers import offload_view
from gateway.workers.views import WorkerView
from prefix_cache.index import ResidencyIndex

log = logging.getLogger(__name__)

MakeClient = Callable[[WorkerSpec], Worker]


class WorkerPool:
    """Workers by name. Those of one model must agree in everything that makes their KV and tokens interchangeable.

    `models`: what may be served, the default first; empty: whatever the first worker brings. `aliases`: further names.
    """

    def __init__(
        self,
        make_client: MakeClient,
        index: ResidencyIndex,
        probes: ProbeConfig,
        clock: Callable[[], float],
        *,
        models: tuple[str, ...] = (),
        aliases: Mapping[str, str] | None = None,
        retry_after: float = 2.0,
    ) -> None:
        self._make_client = make_client
        self._index = index
        self._probes = probes
        self._clock = clock
        self._given = models
        self._models = models
        self._aliases = dict(aliases or {})
        self._retry_after = retry_after
        self._members: dict[str, Member] = {}
        self._drained: set[str] = set()  # names that operators gave; at most as many as there were workers
        self._specs: dict[str, WorkerSpec] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        # What every turn asks of the workers together, until one of them changes.
        self._serving: dict[tuple[str, bool], tuple[Member, ...]] = {}
        self._infos: dict[str, WorkerInfo] = {}
        self._adapters: dict[str, str | None] = {}
        self._opaque: tuple[str, ...] | None = None

    def add(self, name: str, worker: str | WorkerSpec) -> None:
        """Starts looking after a worker (a bare address: a replica of ours). One of the same name that is told otherwise is
        replaced; the same is kept."""
        spec = WorkerSpec(worker) if isinstance(worker, str) else worker
        known = self._members.get(name)
        if known is not None and self._specs.get(name) == spec:
            return
        self.remove(name)
        member = Member(name, self._make_client(spec), self._index, self, self._probes, self._clock)
        member.drained = name in self._drained
        self._specs[name] = spec
        self._members[name] = member
        member.start()

    def remove(self, name: str) -> bool:
        """Forgets a worker; what runs there breaks off. False when there is none of that name."""
        member = self._members.pop(name, None)
        self._specs.pop(name, None)
        if member is None:
            return False
        member.stop()
        task = asyncio.create_task(member.wait_stopped())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        self.changed(member)
        return True

    def drain(self, name: str, draining: bool = True) -> bool:
        """From now on nothing new goes to a worker, and what runs there comes to its end; `draining` False takes it back. It
        holds for whoever bears the name, also after a restart. False when there is nobody of that name."""
        member = self._members.get(name)
        if member is None:
            return False
        (self._drained.add if draining else self._drained.discard)(name)
        if member.drained is not draining:
            member.drained = draining
            log.info("worker %s %s", name, "is drained: nothing new goes there" if draining else "takes requests again")
            self.changed(member)
        return True

    async def close(self) -> None:
        """Forgets all workers and waits for their tasks."""
        for name in tuple(self._members):
            self.remove(name)
        if self._leaving:
            await asyncio.gather(*self._leaving, return_exceptions=True)

    def member(self, name: str) -> Member | None:
        """The worker of this name, whatever its state."""
        return self._members.get(name)

    def candidates(self, model: str, excluded: frozenset[str] | set[str], *, opaque: bool = False) -> list[Member]:
        """Ready workers of a model that take token ids, or, `opaque`, the client's body. Ones that miss their probes are only
        given when there are no others."""
        name = model if opaque else self._resolve(model)
        serving = self._serving.get((name, opaque))
        if serving is None:
            serving = self._serve(name, opaque)
        able = [member for member in serving if member.available]
        if excluded:
            able = [member for member in able if member.name not in excluded]
        return [member for member in able if not member.missed] or able

    def info(self, model: str) -> WorkerInfo:
        """What the ready workers of a model have in common. Raises TurnError 404, 503."""
        name = self._resolve(model)
        known = self._infos.get(name)
        if known is not None:
            return known
        infos = [
            as_adapter(m.info, name)
            for m in self._members.values()
            if m.state is State.READY and m.info is not None and m.info.capabilities.token_prompts and serves(m.info, name)
        ]
        if not infos:
            raise self.none_up(model)
        shortest = min(info.max_model_len for info in infos)
        first = infos[0]
        made = first if first.max_model_len == shortest else msgspec.structs.replace(first, max_model_len=shortest)
        self._infos[name] = made
        return made

    def adapter(self, model: str) -> str | None:
        """The name under which workers serve a model beside their own; None for their own."""
        name = self._resolve(model)
        if name in self._adapters:
            return self._adapters[name]
        own = any(m.info is not None and m.info.model == name for m in self._members.values())
        adapted = any(m.info is not None and name in m.info.adapters for m in self._members.values())
        found = self._adapters[name] = name if adapted and not own else None
        return found

    def opaque_models(self) -> tuple[str, ...]:
        """Names of models that only opaque workers serve, also while none of those is up."""
        if self._opaque is None:
            names: dict[str, None] = {}
            for member in self._members.values():
                if member.info is not None and not member.info.capabilities.token_prompts:
                    names |= dict.fromkeys((member.info.model, *member.info.adapters))
            self._opaque = tuple(name for name in names if name not in self._models and name not in self._aliases)
        return self._opaque

    def is_opaque(self, model: str) -> bool:
        """Whether turns for a model are for opaque workers."""
        if model in self._models or model in self._aliases:
            return False
        infos = (member.info for member in self._members.values())
        return any(info is not None and not info.capabilities.token_prompts and serves(info, model) for info in infos)

    def opaque_info(self, model: str) -> WorkerInfo:
        """What an opaque worker is for one of its models. Raises TurnError 503 while none is up."""
        for member in self._members.values():
            info = member.info
            if info is not None and not info.capabilities.token_prompts and serves(info, model):
                namespace = foreign_namespace(model, info.block_size).hex()
                return msgspec.structs.replace(info, model=model, namespace=namespace, adapters=())
        raise self.none_up(model)

    def models(self) -> tuple[str, ...]:
        """Names a turn may ask for, the default first."""
        return tuple(dict.fromkeys((*self._models, *self._aliases)))

    def none_up(self, model: str) -> TurnError:
        """The answer while no worker of a model can be used; says how those are that serve it, or might."""
        name = self._aliases.get(model, model)
        states = "; ".join(
            f"{m.name} is {'draining' if m.state is State.READY and m.draining else m.state.value}"
            + (f" ({m.detail})" if m.detail else "")
            for m in self._members.values()
            if m.info is None or serves(m.info, name) or m.state is State.MISMATCHED
        )
        return TurnError(
            503,
            "no_worker",
            f"No worker for model '{model}' can take a request now: "
            f"{states or 'none is up, they are starting or restarting'}. Try again shortly.",
            retry_after=self._retry_after,
        )

    def views(self) -> Sequence[WorkerView]:
        """All workers, in the order in which they were added."""
        return [
            WorkerView(
                name=member.name,
                url=member.client.url,
                state=member.state.value,
                detail=member.detail,
                info=member.info,
                in_flight=member.books.requests,
                queued_tokens=member.books.queued_tokens,
                indexed_blocks=self._index.blocks(member.name),
                events_lag=member.events_lag,
                event_trouble=member.client.event_trouble if isinstance(member.client, CountsTrouble) else {},
                draining=member.draining,
                # An old report is no report.
                offload=offload_view(member.stats) if member.state is State.READY else None,
            )
            for member in self._members.values()
        ]

    async def wait_ready(self, count: int, timeout: float | None = None) -> None:
        """Waits until `count` workers are ready. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while sum(member.state is State.READY for member in self._members.values()) < count:
                self._changed.clear()
                await self._changed.wait()

    async def wait_changed(self, timeout: float) -> None:
        """Waits until a worker has come, gone, or changed its state, for `timeout` seconds at most."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            pass

    # A member's watcher

    def admits(self, member: Member, info: WorkerInfo) -> str | None:
        if not info.capabilities.token_prompts:
            return None  # Nothing of it is interchanged with anything.
        others = (m.info for m in self._members.values() if m is not member and m.state is State.READY)
        peers = [peer for peer in others if peer is not None and peer.capabilities.token_prompts]
        allowed = self._given or tuple(dict.fromkeys(peer.model for peer in peers))
        if allowed and info.model not in allowed:
            return f"it serves model '{info.model}', this gateway serves {', '.join(allowed)}"
        for peer in peers:
            if peer.model != info.model:
                continue
            for field in ("namespace", "block_size", "vocab_size"):
                theirs, ours = getattr(info, field), getattr(peer, field)
                if theirs != ours and not (field == "vocab_size" and 0 in (theirs, ours)):
                    return (
                        f"its {field} is {theirs}, that of the other workers of '{info.model}' is {ours}: "
                        "their KV or tokens are not interchangeable"
                    )
        if not self._given:
            self._models = allowed or (info.model,)
        return None

    def changed(self, member: Member) -> None:
        self._serving.clear()
        self._infos.clear()
        self._adapters.clear()
        self._opaque = None
        self._changed.set()

    def _serve(self, name: str, opaque: bool) -> tuple[Member, ...]:
        """Whoever serves a model and takes token ids, or bodies, whatever its state."""
        serving = tuple(
            member
            for member in self._members.values()
            if member.info is not None and member.info.capabilities.token_prompts is not opaque and serves(member.info, name)
        )
        if serving:
            self._serving[name, opaque] = serving
        return serving

    def _resolve(self, model: str) -> str:
        name = self._aliases.get(model, model)
        if name in self._models:
            return name
        if not self._models:
            raise self.none_up(model)
        known = ", ".join(f"'{known}'" for known in (*self.models(), *self.opaque_models())[:16])
        raise TurnError(404, "model_not_found", f"There is no model '{model[:128]}' here. Models are: {known}.", param="model")


def serves(info: WorkerInfo, model: str) -> bool:
    """Whether a worker takes requests for a model, as its own or as an adapter."""
    return model == info.model or model in info.adapters


def as_adapter(info: WorkerInfo, model: str) -> WorkerInfo:
    """What a worker is for one of its models: KV of an adapter is not that of its base."""
    if model == info.model:
        return info
    namespace = adapter_namespace(bytes.fromhex(info.namespace), model).hex()
    return msgspec.structs.replace(info, model=model, namespace=namespace, adapters=())
