"""Answers that are not what was asked for: every one is an ErrorReply with a stable code and a sentence."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from engine.core import RequestRefused
from engine.thread import Unavailable
from gateway.workers.protocol import ErrorDetail, ErrorReply

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {
    "not_found": 404,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "duplicate_request_id": 409,
    "unknown_prefix": 412,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "invalid_grammar": 422,
    "unsupported_grammar": 422,
    "internal_error": 500,
    "queue_full": 503,
    "too_many_subscribers": 503,
    "starting": 503,
    "shutting_down": 503,
    "engine_failed": 503,
}


def json_reply(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A value of the protocol as a JSON answer."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def refusal(code: str, message: str, field: str | None = None, retry_after: float | None = None) -> web.Response:
    """A refusal. A code that is not in docs/worker-protocol.md is a 400."""
    headers = None if retry_after is None else {"Retry-After": str(max(math.ceil(retry_after), 1))}
    return json_reply(ErrorReply(ErrorDetail(code, message, field)), _STATUS.get(code, 400), headers)


def request_path(field: str) -> str:
    """msgspec's `$.sampling.stop[0]` as `sampling.stop[0]`."""
    return field.removeprefix("$").removeprefix(".")


@web.middleware
async def errors_as_replies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception of a handler into an answer. A stream that has begun is cut instead."""
    try:
        return await handler(request)
    except RequestRefused as refused:
        return refusal(refused.code, refused.message, refused.field)
    except Unavailable as busy:
        return refusal(busy.code, busy.message, retry_after=busy.retry_after)
    except web.HTTPNotFound:
        return refusal("not_found", f"There is no {request.path} here; docs/worker-protocol.md lists what there is.")
    except web.HTTPMethodNotAllowed as wrong:
        allowed = ", ".join(sorted(wrong.allowed_methods))
        return refusal("method_not_allowed", f"{request.path} takes {allowed}, not {wrong.method}.")
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return refusal("internal_error", "The replica failed to answer this request; its log has the reason.")
