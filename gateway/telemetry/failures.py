"""How the end of a turn without an answer is named, in metrics and spans alike."""

from __future__ import annotations

import asyncio

from gateway.turn import TurnError

CLIENT_GONE = 499
"""Nginx's status for a client that closed the connection."""


def classify(error: BaseException) -> tuple[int, str]:
    """(HTTP status, error.type) of what ended a turn."""
    if isinstance(error, TurnError):
        return error.status, error.code
    if isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError):
        return CLIENT_GONE, "client_disconnected"
    return 500, type(error).__qualname__
