"""Tool-call arguments as they come back in a history, made whole."""

from __future__ import annotations

from typing import Any

import msgspec


def arguments_object(arguments: object) -> dict[str, Any]:
    """The arguments of a past call as a dict.

    Clients return them as JSON text, as an object, as "" or null for a call without parameters, or broken where a
    generation was cut. An object (or its JSON text) is taken as it is, everything else is {}: a bad old call must not
    make the whole history unusable.
    """
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str | bytes):
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
