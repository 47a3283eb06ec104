"""Headers of an answer that say where a turn went and what it found there."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from aiohttp import web

from gateway.running import RunningTurn
from gateway.turn import Receipt, SessionRef
from sessions.explain.misses import Miss

REQUEST_ID = "X-Request-ID"
KNOWN_AS = web.RequestKey("known_as", str)
"""Where the application keeps a request's id while it is served."""
LIMITS = web.RequestKey("limits", dict[str, str])
"""Where it keeps the headers that say how much of the key's limits is left."""
REPLICA = "X-Turnkeep-Replica"
ROUTE = "X-Turnkeep-Route"
SESSION = "X-Turnkeep-Session"
CACHED_TOKENS = "X-Turnkeep-Cached-Tokens"
PROMPT_TOKENS = "X-Turnkeep-Prompt-Tokens"
MISS = "X-Turnkeep-Miss"
ATTACHED = "X-Turnkeep-Attached"
WARNING = "X-Turnkeep-Warning"

_MAX_REQUEST_ID = 128
_MAX_WARNING = 1024


def request_id(headers: Mapping[str, str]) -> str:
    """The client's X-Request-ID where it is fit for a log line, else a new one. For people who follow a request through
    logs; two requests may carry the same, so nothing is looked up by it."""
    given = headers.get(REQUEST_ID, "").strip()
    if 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return "req-" + secrets.token_hex(12)


def session_headers(session: SessionRef) -> dict[str, str]:
    """`KEY; source=SOURCE`, the key percent-encoded. Nothing for a request that names no session."""
    if session.key is None:
        return {}
    return {SESSION: f"{quote(session.key, safe='/:')}; source={session.source}"}


def miss_header(miss: Miss | None) -> dict[str, str]:
    """Why the turn reused less than its predecessor left: cause, where in the request, tokens computed again, seconds lost.
    Nothing for a turn that missed nothing."""
    if miss is None:
        return {}
    parts: list[str] = [miss.cause]
    if miss.path:
        parts.append(f"path={quote(miss.path, safe='[].*_-/:@')}")
    parts.append(f"tokens={miss.lost_tokens}")
    if miss.lost_seconds is not None:
        parts.append(f"seconds={miss.lost_seconds:.3f}")
    return {MISS: "; ".join(parts)}


def attached_header(how: str | None, first: str) -> dict[str, str]:
    """`running` or `finished`, and the id of the request that began the turn. Nothing for that one itself."""
    return {} if how is None else {ATTACHED: f"{how}; request={first}"}


def warning_header(warnings: Iterable[str]) -> dict[str, str]:
    """All warnings on one line of visible ASCII."""
    text = "; ".join(warnings)
    if not text:
        return {}
    if len(text) > _MAX_WARNING:
        text = text[: _MAX_WARNING - 3] + "..."
    return {WARNING: "".join(character if " " <= character <= "~" else "?" for character in text)}


def placement_headers(running: RunningTurn, *, started: bool) -> dict[str, str]:
    """Which replica, how many prompt tokens, and, once the prompts have `started`, how many of them were cached."""
    usage = running.usage
    headers = {REPLICA: running.workers, ROUTE: _route(running.receipts), PROMPT_TOKENS: str(usage.prompt_tokens)}
    if started and running.cached_known:
        headers[CACHED_TOKENS] = str(usage.cached_tokens)
    return headers


def _route(receipts: Sequence[Receipt]) -> str:
    """Why each prompt went where it went: `REASON; candidates=N; matched=TOKENS; estimated=SECONDS`."""
    return ", ".join(
        f"{receipt.reason}; candidates={receipt.candidates}; matched={receipt.matched_tokens}; estimated={receipt.seconds:.3f}"
        for receipt in receipts
    )
