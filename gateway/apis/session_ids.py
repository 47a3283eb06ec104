"""Which session a request to /v1/sessions means: a part of the path, or `?id=`.

Clients and proxies tidy paths before they send them: `.` and `..` vanish, `//` and `%2F` become `/`. Ids with such parts come
as `?id=`, which nobody touches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.turn import TurnError
from sessions.identity import bounded_key

_BASE = "/v1/sessions"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def names_session(request: web.Request) -> bool:
    """Whether the request has `?id=`."""
    return "id" in request.query


def session_id(request: web.Request) -> str:
    """The key of the session that is meant. Raises TurnError 400 where none is named, or two."""
    if names_session(request):
        if "id" in request.match_info or len(request.query.getall("id")) > 1:
            raise TurnError(400, "invalid_request", "id: name one session, in the path or with ?id=ID, not two.", param="id")
        name = request.query["id"]
    else:
        name = request.match_info.get("id", "")
        if not name and request.method == "GET":
            name = request.path.removeprefix(_BASE).removeprefix("/")  # a session that is called like an action
    if not name:
        raise TurnError(400, "invalid_request", f"id: name a session, as {_BASE}/ID or with ?id=ID.", param="id")
    return bounded_key(name)


def add_action(router: web.UrlDispatcher, method: str, action: str, handler: Handler) -> None:
    """`/v1/sessions/ID/ACTION` and `/v1/sessions/ACTION?id=ID`."""
    router.add_route(method, f"{_BASE}/{{id:.+}}/{action}", handler)
    router.add_route(method, f"{_BASE}/{action}", handler)
