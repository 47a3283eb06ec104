"""/v1/sessions: what is kept of an API key's sessions, and how one is forked or closed."""

from __future__ import annotations

import secrets
from typing import Any

import orjson
from aiohttp import web

from gateway.apis.arrivals import Arrivals
from gateway.apis.session_ids import add_action, names_session, session_id
from gateway.histories.keeper import HistoryKeeper
from gateway.pipeline import Pipeline
from gateway.turn import TurnError
from prefix_cache.hashing import DIGEST_BYTES, JoinedDigests
from sessions.identity import bounded_key
from sessions.ledger import Ledger
from sessions.records import SessionRecord

_PAGE = 50
_MAX_PAGE = 1000


class SessionRoutes:
    """Everybody sees the sessions of their own API key and no others: those of somebody else are not there. Administrators may
    name a tenant (`?tenant=ID`)."""

    def __init__(self, pipeline: Pipeline, arrivals: Arrivals) -> None:
        self._pipeline = pipeline
        self._arrivals = arrivals

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Registers the endpoints. Session ids may hold slashes."""
        router.add_get("/v1/sessions", self.page_or_one)
        router.add_delete("/v1/sessions", self.delete)
        add_action(router, "POST", "fork", self.fork)
        router.add_get("/v1/sessions/{id:.+}", self.show)
        router.add_delete("/v1/sessions/{id:.+}", self.delete)

    async def page_or_one(self, request: web.Request) -> web.Response:
        """`?id=ID`: that session; else a page of them."""
        return await (self.show(request) if names_session(request) else self.page(request))

    async def page(self, request: web.Request) -> web.Response:
        """Sessions in the order of their ids."""
        tenant = self._arrivals.scope(request)
        page = await self._keeper.store.page(tenant, after=request.query.get("after") or None, limit=_limit(request))
        body = {
            "object": "list",
            "data": [_summary(record) for record in page.records],
            "has_more": page.after is not None,
            "after": page.after,
        }
        return _json(body)

    async def show(self, request: web.Request) -> web.Response:
        """One session with its branches, and where their blocks are."""
        record = await known_session(self._pipeline, self._arrivals.scope(request), session_id(request))
        body = _summary(record)
        body["branches"] = [self._branch(ledger) for ledger in record.branches]
        return _json(body)

    async def fork(self, request: web.Request) -> web.Response:
        """A new session with the history of this one. Body: {"session_id": name}, or none for a name of our own."""
        tenant = self._arrivals.scope(request)
        name: Any = None
        if request.can_read_body:
            arrival, _ = await self._arrivals.body(request)
            name = arrival.body.get("session_id")
            if name is not None and not (isinstance(name, str) and name.strip()):
                raise TurnError(400, "invalid_request", "session_id: a non-empty string is expected.", param="session_id")
        key = bounded_key(name.strip()) if name is not None else "fork-" + secrets.token_hex(8)
        forked = await self._keeper.fork(tenant, session_id(request), key)
        if forked is None:
            raise _unknown(session_id(request))
        return _json(_summary(forked), status=201)

    async def delete(self, request: web.Request) -> web.Response:
        """Forgets a session; workers may give up its blocks first."""
        key = session_id(request)
        tenant = self._arrivals.scope(request)
        if not await self._keeper.forget(tenant, key):
            raise _unknown(key)
        self._pipeline.watch.closed(tenant, key)
        return _json({"id": key, "object": "session", "deleted": True})

    @property
    def _keeper(self) -> HistoryKeeper:
        return _keeper_of(self._pipeline)

    def _branch(self, ledger: Ledger) -> dict[str, Any]:
        holders = self._pipeline.residency(JoinedDigests(ledger.blocks))
        return {
            "messages": ledger.num_messages,
            "tokens": ledger.num_tokens,
            "generated_tokens": ledger.generated_tokens,
            "blocks": len(ledger.blocks) // DIGEST_BYTES,
            "used_at": ledger.used_at,
            "replica": ledger.worker or None,
            "residency": {
                worker: {"blocks": blocks, "tokens": blocks * ledger.block_size} for worker, blocks in holders.items()
            },
        }


async def known_session(pipeline: Pipeline, tenant: str, key: str) -> SessionRecord:
    """A session of a tenant. Raises TurnError 404: there is none, or none are kept."""
    record = await _keeper_of(pipeline).store.get(tenant, key)
    if record is None:
        raise _unknown(key)
    return record


def _keeper_of(pipeline: Pipeline) -> HistoryKeeper:
    if pipeline.keeper is None:
        raise TurnError(
            404,
            "ledger_off",
            "This gateway keeps no sessions; start it without --no-ledger (sessions.ledger) to have them.",
        )
    return pipeline.keeper


def _summary(record: SessionRecord) -> dict[str, Any]:
    return {
        "id": record.key,
        "object": "session",
        "model": record.model,
        "named": record.named,
        "source": record.source,
        "parent": record.parent,
        "correlation": record.correlation,
        "created_at": record.created_at,
        "used_at": record.used_at,
        "turns": record.turns,
        "tokens": {
            "prompt": record.prompt_tokens,
            "cached": record.cached_tokens,
            "generated": record.generated_tokens,
            "reused": record.reused_tokens,
            "spliced": record.spliced_tokens,
            "tokenised": record.tokenised_tokens,
        },
        "hit_rate": record.cached_tokens / record.prompt_tokens if record.prompt_tokens else 0.0,
        "misses": record.misses,
        "superseded_blocks": record.superseded_blocks,
        "cost": {"prefill_seconds": record.prefill_seconds, "decode_seconds": record.decode_seconds},
        "ledger_bytes": record.nbytes,
    }


def _limit(request: web.Request) -> int:
    text = request.query.get("limit")
    if text is None:
        return _PAGE
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= _MAX_PAGE):
        raise TurnError(400, "invalid_request", f"limit: a number from 1 to {_MAX_PAGE} is expected.", param="limit")
    return int(text)


def _unknown(key: str) -> TurnError:
    return TurnError(404, "session_not_found", f"There is no session '{key[:128]}' under this API key.", param="id")


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")
