"""Workers that register themselves, for a while at a time: who does not come back is forgotten."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import orjson
from aiohttp import web

from gateway.apis.bodies import fit, parse_object, read_body
from gateway.discovery.fleet import Publish
from gateway.turn import TurnError
from gateway.workers.spec import DEFAULT_CONCURRENCY, KINDS, WorkerSpec

log = logging.getLogger(__name__)

_MAX_BODY = 64 * 1024
_BODY_TIMEOUT = 10.0
MIN_TOKEN = 16
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]


class Registration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker says of itself. `ttl`: seconds for which it holds unless it is said again."""

    name: _Name
    url: Annotated[str, msgspec.Meta(max_length=1024)]
    kind: str = "turnkeep"
    events: str | None = None
    replay: str | None = None
    topic: str = ""
    model: str | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = DEFAULT_CONCURRENCY
    ttl: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 15.0


class Registry:
    """A source of the workers that have registered; at most `max_workers`. `clock` gives monotonic seconds."""

    name = "registered"
    kinds = frozenset(KINDS)

    def __init__(self, *, max_workers: int = 1024, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_workers = max_workers
        self._clock = clock
        self._leases: dict[str, tuple[WorkerSpec, float]] = {}
        self._changed = asyncio.Event()

    def register(self, registration: Registration) -> None:
        """Takes a worker in, or its lease anew. Raises TurnError."""
        fields = msgspec.structs.asdict(registration)
        name, ttl = fields.pop("name"), fields.pop("ttl")
        try:
            spec = WorkerSpec(**fields)
        except ValueError as error:
            field = "url" if registration.kind in KINDS else "kind"
            raise TurnError(400, "invalid_request", f"{error}.", param=field) from error
        known = self._leases.get(name)
        if known is None and len(self._leases) >= self._max_workers:
            raise TurnError(
                503, "too_many_workers", f"{self._max_workers} workers have registered, as many as are taken.", retry_after=60.0
            )
        self._leases[name] = (spec, self._clock() + ttl)
        if known is None or known[0] != spec:
            log.info("worker %s has registered: %s at %s", name, spec.kind, spec.url)
        self._changed.set()

    def deregister(self, name: str) -> bool:
        """A worker goes. False when there was none of that name."""
        found = self._leases.pop(name, None) is not None
        if found:
            log.info("worker %s has deregistered", name)
            self._changed.set()
        return found

    async def run(self, publish: Publish) -> None:
        told: dict[str, WorkerSpec] = {}
        while True:
            self._changed.clear()
            now = self._clock()
            for name, (_, expires) in tuple(self._leases.items()):
                if expires <= now:
                    log.warning("worker %s has not registered again in time", name)
                    del self._leases[name]
            workers = {name: spec for name, (spec, _) in self._leases.items()}
            if workers != told:
                publish(workers)
                told = workers
            soonest = min((expires for _, expires in self._leases.values()), default=None)
            try:
                async with asyncio.timeout(None if soonest is None else max(soonest - now, 0.01)):
                    await self._changed.wait()
            except TimeoutError:
                pass


class RegistrationRoutes:
    """`POST /workers/register`, `DELETE /workers/register/NAME`: for who has the token, and nobody else."""

    def __init__(self, registry: Registry, token: str) -> None:
        """Raises ValueError for a token that can be guessed."""
        if len(token) < MIN_TOKEN:
            raise ValueError(f"the registration token must have at least {MIN_TOKEN} characters")
        self._registry = registry
        self._token = token.encode()

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Registers the endpoints."""
        router.add_post("/workers/register", self.register)
        router.add_delete("/workers/register/{name}", self.deregister)

    async def register(self, request: web.Request) -> web.Response:
        """Also how a worker says that it is still there."""
        self._check(request)
        raw = await read_body(request, max_bytes=_MAX_BODY, timeout=_BODY_TIMEOUT)
        registration = fit(parse_object(raw)[0], Registration)
        self._registry.register(registration)
        return web.Response(
            body=orjson.dumps({"name": registration.name, "ttl": registration.ttl}), content_type="application/json"
        )

    async def deregister(self, request: web.Request) -> web.Response:
        """It finishes what it has, and gets nothing new."""
        self._check(request)
        found = self._registry.deregister(request.match_info["name"])
        return web.Response(body=orjson.dumps({"deregistered": found}), content_type="application/json")

    def _check(self, request: web.Request) -> None:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            raise TurnError(
                401, "invalid_token", "Registering takes the gateway's registration token: Authorization: Bearer TOKEN."
            )
