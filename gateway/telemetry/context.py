"""W3C trace context as far as the gateway needs it without a tracing library: check it and pass it on."""

from __future__ import annotations

import re
from collections.abc import Mapping

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")
_MAX_TRACESTATE = 512


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """The request's traceparent and tracestate, when they are well-formed; header names match in any case.

    A tracestate without a valid traceparent, or one that is too long or not printable, is dropped, as the W3C asks.
    """
    parent = _find(headers, "traceparent")
    if parent is None or len(parent) > 256 or not _TRACEPARENT.fullmatch(parent):
        return {}
    found = {"traceparent": parent}
    state = _find(headers, "tracestate")
    if state and len(state) <= _MAX_TRACESTATE and state.isascii() and state.isprintable():
        found["tracestate"] = state
    return found


def _find(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name)
    if value is None and isinstance(headers, dict):  # Those of a request match in any case by themselves.
        value = next((text for key, text in headers.items() if key.lower() == name), None)
    return None if value is None else value.strip()
