"""What was learned of turns, for whoever sent them: GET /v1/tools/gaps and GET /v1/sessions/{id}/misses."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from gateway.apis.arrivals import Arrivals
from gateway.apis.session_ids import Handler, add_action, names_session, session_id
from gateway.apis.sessions import known_session
from gateway.pipeline import Pipeline
from gateway.turn import TurnError
from sessions.explain.misses import advice_from
from sessions.gaps.model import NO_TOOL, GapRow
from sessions.identity import bounded_key

_MAX_ROWS = 1000


class WatchRoutes:
    """Both endpoints. A tenant sees its own tools and sessions only."""

    def __init__(self, pipeline: Pipeline, arrivals: Arrivals, show: Handler) -> None:
        """`show` answers GET /v1/sessions/ID."""
        self._show = show
        self._pipeline = pipeline
        self._watch = pipeline.watch
        self._arrivals = arrivals

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Registers the endpoints: before those of sessions, whose ids may end as this path does."""
        router.add_get("/v1/tools/gaps", self.gaps)
        add_action(router, "GET", "misses", self.misses)

    async def gaps(self, request: web.Request) -> web.Response:
        """`?tool=NAME`: of one tool; `tool=` of turns that called none."""
        tenant = self._arrivals.scope(request)
        wanted = request.query.get("tool")
        rows = self._watch.gaps.model.rows(tenant, tool=None if wanted is None else bounded_key(wanted) if wanted else NO_TOOL)
        if wanted is not None and not rows:
            raise TurnError(404, "not_found", "No gap of this tool was seen with this API key yet.", param="tool")
        data = [_row(row) for row in rows[:_MAX_ROWS]]
        return web.json_response({"object": "list", "data": data, "has_more": len(rows) > _MAX_ROWS})

    async def misses(self, request: web.Request) -> web.StreamResponse:
        """The last misses of a session, the newest first, and advice. 404 where GET /v1/sessions/{id} says so."""
        if "id" not in request.match_info and not names_session(request):
            return await self._show(request)  # a session of that name
        tenant = self._arrivals.scope(request)
        key = session_id(request)
        await known_session(self._pipeline, tenant, key)
        misses = self._watch.misses.log.misses(tenant, key)
        return web.json_response(
            {
                "object": "list",
                "session": key,
                "data": [{"object": "miss", **msgspec.to_builtins(miss)} for miss in reversed(misses)],
                "advice": [msgspec.to_builtins(advice) for advice in advice_from(misses)],
            }
        )


def _row(row: GapRow) -> dict[str, Any]:
    return {
        "object": "tool_gap",
        "tool": row.tool if row.tool != NO_TOOL else None,
        "observed": row.observed,
        "weight": round(row.weight, 3),
        "p50": round(row.p50, 3),
        "p90": round(row.p90, 3),
        "p99": round(row.p99, 3),
    }
