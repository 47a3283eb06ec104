"""GET /v1/routes: why requests went where they went, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import orjson
from aiohttp import web

from gateway.apis.arrivals import Arrivals
from gateway.router.receipts import Decision, RouteLog
from gateway.turn import TurnError
from sessions.identity import bounded_key

_PAGE = 20
_MAX_PAGE = 1000


class RouteRoutes:
    """A tenant sees its own requests; administrators those of one (`?tenant=ID`) or of all (`?tenant=*`)."""

    def __init__(self, log: RouteLog, arrivals: Arrivals) -> None:
        self._log = log
        self._arrivals = arrivals

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/routes", self.page)

    async def page(self, request: web.Request) -> web.Response:
        """`?session=`, `?worker=`, `?request=`: of these only; `?limit=`: how many, the newest first."""
        tenant = self._arrivals.scope(request)
        query = request.query
        found = self._log.newest(
            tenant=None if query.get("tenant") == "*" else tenant,
            session=None if (named := query.get("session")) is None else bounded_key(named),
            worker=query.get("worker"),
            request_id=query.get("request"),
        )
        limit = _limit(query.get("limit"))
        decisions = list(islice(found, limit + 1))
        body = {"object": "list", "data": [_shown(each) for each in decisions[:limit]], "has_more": len(decisions) > limit}
        return web.Response(body=orjson.dumps(body), content_type="application/json")


def _shown(decision: Decision) -> dict[str, Any]:
    outcome, shadow = decision.outcome, decision.shadow
    return {
        "object": "route",
        "request": decision.request_id,
        "at": decision.at,
        "session": decision.session,
        "prompt_tokens": decision.prompt_tokens,
        "policy": decision.policy,
        "worker": decision.worker,
        "reason": decision.reason,
        "home": decision.home,
        "estimated_seconds": _rounded(decision.seconds),
        "candidates": _candidates(decision),
        "outcome": {
            "result": outcome.result,
            "cached_tokens": outcome.cached_tokens,
            "queue_seconds": _rounded(outcome.queue_seconds),
            "prefill_seconds": _rounded(outcome.prefill_seconds),
            "time_to_first_token": _rounded(outcome.time_to_first_token),
            "regret_seconds": _rounded(outcome.regret),
        },
        "shadow": None
        if shadow is None
        else {
            "policy": shadow.policy,
            "worker": shadow.worker,
            "reason": shadow.reason,
            "estimated_seconds": _rounded(shadow.seconds),
        },
    }


def _candidates(decision: Decision) -> Iterable[dict[str, Any]]:
    rows = [
        {"worker": worker, "matched_tokens": matched, **{f"{term}_seconds": _rounded(value) for term, value in terms.items()}}
        for worker, matched, terms in decision.candidates()
    ]
    return sorted(rows, key=lambda row: row["worker"] != decision.worker)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _limit(text: str | None) -> int:
    if text is None:
        return _PAGE
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= _MAX_PAGE):
        raise TurnError(400, "invalid_request", f"limit: a number from 1 to {_MAX_PAGE} is expected.", param="limit")
    return int(text)
