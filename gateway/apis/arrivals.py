"""What every request goes through first: key, body, identity."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from gateway.admission.limits import RateLimits
from gateway.apis.bodies import parse_object, receive_body
from gateway.apis.body_memo import BodyMemo, Following, Remembered
from gateway.apis.body_pieces import BodyPieces
from gateway.apis.endpoint import Arrival
from gateway.apis.headers import KNOWN_AS, LIMITS
from gateway.auth import ApiKeys, Caller
from gateway.config import GatewayConfig
from gateway.telemetry.stages import StageTimes
from gateway.turn import SessionRef, Turn
from sessions.identity import identify


class Arrivals:
    """Turns an HTTP request into an Arrival. Every method raises TurnError."""

    def __init__(
        self,
        config: GatewayConfig,
        keys: ApiKeys,
        limits: RateLimits,
        stages: StageTimes,
        *,
        keeps_raw: Callable[[Mapping[str, Any]], bool] = lambda body: False,
    ) -> None:
        """`keeps_raw`: whose bodies are needed as they came."""
        self._keeps_raw = keeps_raw
        self._stages = stages
        self._limits = limits
        self._keys = keys
        self._http = config.http
        self._sources = config.session_sources
        self._memo = BodyMemo(config.http.body_memo_bytes)

    def remember(self, arrival: Arrival, turn: Turn) -> None:
        """Keeps what a turn was parsed into for the one after it."""
        if arrival.seen is not None:
            self._memo.keep(arrival.seen, arrival.body, turn.messages, turn.message_digests)

    def tenant(self, request: web.Request) -> str:
        """The tenant whose key the request carries."""
        return self._keys.tenant(request.headers)

    def caller(self, request: web.Request) -> Caller:
        """Who sent the request, and what they may do."""
        return self._keys.caller(request.headers)

    def scope(self, request: web.Request) -> str:
        """The tenant whose sessions a request is about: the caller's, or, for administrators, the one in `?tenant=ID`."""
        named = request.query.get("tenant")
        if named is None:
            self._keys.require_name(request)
            return self.tenant(request)
        self.require_admin(request)
        return named

    def require_admin(self, request: web.Request) -> None:
        """Returns when the request may administer the gateway (docs/security.md). Handlers for them begin so."""
        self._keys.require_admin(request)

    async def body(self, request: web.Request, *, conversation: bool = False) -> tuple[Arrival, list[str]]:
        """The request's JSON object, and warnings. The key, and how often it came, are checked before anything is read.
        `conversation`: it begins with what the one before of its conversation did, mostly."""
        caller = self.caller(request)
        request[LIMITS] = dict(await self._limits.request(caller))
        wall_clock, monotonic = time.time(), time.monotonic()
        following = Following(self._memo, caller.tenant) if conversation and self._http.body_memo_bytes else None
        pieces = following.pieces if following is not None else BodyPieces()
        take = pieces.add if following is None else partial(self._follow, following)
        await receive_body(request, take, max_bytes=self._http.max_body_bytes, timeout=self._http.body_timeout)
        warnings: list[str]
        seen = None
        with self._stages.spent("parse"):
            found = self._memo.parse(following) if following is not None else None
            if found is not None:
                (body, seen), warnings = found, []
            else:
                raw = pieces.whole()
                body, warnings = parse_object(raw)
                if conversation and not warnings:
                    seen = Remembered(caller.tenant, raw)
        kept = pieces.whole() if self._keeps_raw(body) else b""
        return Arrival(request, request[KNOWN_AS], body, wall_clock, monotonic, caller, kept, seen), warnings

    def _follow(self, following: Following, piece: bytes) -> None:
        with self._stages.spent("parse"):
            following.feed(piece)

    async def turn(self, request: web.Request, *, conversation: bool = False) -> tuple[Arrival, SessionRef, list[str]]:
        """As `body`, with the session that the request belongs to."""
        arrival, warnings = await self.body(request, conversation=conversation)
        with self._stages.spent("identity"):
            found = identify(request.headers, arrival.body, tenant=arrival.caller.tenant, order=self._sources)
            session = SessionRef(
                tenant=found.tenant,
                key=found.key,
                source=found.source,
                parent=found.parent,
                correlation=found.correlation,
                conflicts=found.conflicts,
                final=found.final,
                ttl=found.ttl,
            )
        return arrival, session, warnings
