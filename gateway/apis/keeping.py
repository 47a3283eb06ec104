"""POST /v1/sessions/{id}/pin, /release, /prefetch: what a client knows of a session's next turn.

All three are hints to the replicas that served the session's branches last. They are answered at once; nothing depends on them.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson
from aiohttp import web

from gateway.apis.arrivals import Arrivals
from gateway.apis.session_ids import add_action, session_id
from gateway.apis.sessions import known_session
from gateway.pipeline import Pipeline
from gateway.turn import TurnError
from gateway.workers.protocol import RetentionHint

DEFAULT_TTL = 300.0
MAX_TTL = 86_400.0


class KeepingRoutes:
    """Everybody may do this to the sessions of their own API key."""

    def __init__(self, pipeline: Pipeline, arrivals: Arrivals) -> None:
        self._pipeline = pipeline
        self._arrivals = arrivals

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Registers the endpoints; before those of sessions, whose ids may hold slashes."""
        add_action(router, "POST", "pin", self.pin)
        add_action(router, "POST", "release", self.release)
        add_action(router, "POST", "prefetch", self.prefetch)

    async def pin(self, request: web.Request) -> web.Response:
        """Its blocks are given up after all others' for a while. Body: {"ttl": seconds}, or none for five minutes."""
        ttl = DEFAULT_TTL
        if request.can_read_body:
            arrival, _ = await self._arrivals.body(request)
            given = arrival.body.get("ttl", DEFAULT_TTL)
            if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= MAX_TTL:
                message = f"ttl: a number of seconds above 0 and at most {MAX_TTL:g} is expected."
                raise TurnError(400, "invalid_request", message, param="ttl")
            ttl = float(given)
        return await self._tell(request, "waiting", {"pinned": True, "ttl": ttl}, ttl)

    async def release(self, request: web.Request) -> web.Response:
        """Ends a pin: its blocks are given up like others'."""
        return await self._tell(request, "released", {"pinned": False})

    async def prefetch(self, request: web.Request) -> web.Response:
        """It will be here soon: what of it lies on disk only is brought into memory."""
        return await self._tell(request, "prefetch", {"prefetching": True})

    async def _tell(
        self,
        request: web.Request,
        state: Literal["waiting", "released", "prefetch"],
        answer: dict[str, Any],
        ttl: float | None = None,
    ) -> web.Response:
        tenant, key = self._arrivals.scope(request), session_id(request)
        record = await known_session(self._pipeline, tenant, key)
        workers = sorted({ledger.worker for ledger in record.branches if ledger.worker})
        for worker in workers:
            hint = RetentionHint(session=key, tenant=tenant, request_id=f"{state}-{key}"[:256], state=state, ttl=ttl)
            self._pipeline.retain(worker, hint)
        body = {"id": key, "object": "session", **answer, "replicas": workers}
        return web.Response(body=orjson.dumps(body), content_type="application/json", status=202)
