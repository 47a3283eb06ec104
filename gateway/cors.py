"""Which web pages may call the gateway (the Fetch standard's CORS protocol). None by default: then nothing is said about it,
and browsers let no page read an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_METHODS = "GET, POST, DELETE, OPTIONS"
_MAX_AGE = "600"
_EXPOSED = "X-Request-ID, X-Turnkeep-Replica, X-Turnkeep-Session, X-Turnkeep-Cached-Tokens, X-Turnkeep-Warning, Retry-After"


def allow_origins(origins: tuple[str, ...]) -> Middleware:
    """A middleware that answers preflights of these origins and marks answers to them; "*" allows all. Keys travel in headers
    that a page must set itself, never in cookies, so credentials are not allowed."""
    allowed = frozenset(origins)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is None or not ("*" in allowed or origin in allowed):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Origin": "*" if "*" in allowed else origin,
            "Vary": "Origin",
            "Access-Control-Expose-Headers": _EXPOSED,
        }
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            wanted = request.headers.get("Access-Control-Request-Headers", "")
            return web.Response(
                status=204,
                headers={
                    **headers,
                    "Access-Control-Allow-Methods": _METHODS,
                    "Access-Control-Allow-Headers": wanted[:1000],
                    "Access-Control-Max-Age": _MAX_AGE,
                },
            )
        request[CORS_HEADERS] = headers
        response = await handler(request)
        if not response.prepared:
            response.headers.update(headers)
        return response

    return middleware


CORS_HEADERS = web.RequestKey("cors_headers", dict[str, str])
"""Where a request keeps what its answer must carry, for answers that begin inside the handler."""


async def mark(request: web.Request, response: web.StreamResponse) -> None:
    """For `Application.on_response_prepare`: streams are under way before any middleware sees them."""
    response.headers.update(request.get(CORS_HEADERS, {}))
