"""OpenAI's shape of an error."""

from __future__ import annotations

from typing import Any

from gateway.turn import TurnError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_body(error: TurnError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
