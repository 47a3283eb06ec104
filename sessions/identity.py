"""Who is talking: the session, its parent and the job it belongs to, read from what agents send anyway.

Pure functions over a request's headers and body; nothing is stored here. The first source of `DEFAULT_ORDER` that yields a
value names the session; others that name another one are reported as conflicts, and otherwise without effect
(docs/http-api.md lists them for users):

    headers, most specific first     Session-ID, X-Session-ID; X-Claude-Code-Session-ID (with X-Claude-Code-Agent-ID);
                                     Session-ID with Thread-ID, or Thread-ID alone (Codex; older: session_id);
                                     X-Session-Affinity (OpenCode); X-Dynamo-Session-ID; X-SMG-Routing-Key;
                                     X-LiteLLM-Session-ID
    then fields of the body          session_id; vllm_xargs.session_id; agent_hint.session_id; prompt_cache_key;
                                     metadata.session_id; metadata.user_id where Claude Code packs a session in it
    last                             Correlation-ID, X-Correlation-ID: they group the sessions of a job, and name a
                                     session only where nothing finer does

Beside the name: Session-Final, X-Session-Final or X-Dynamo-Session-Final with a true value says that this turn is the
session's last; agent_hint.cache_control.ttl how long the caller expects to come back within.

X-Request-ID and traceparent never name a session: they change with every turn. previous_response_id is a hint to a stored
answer, not a name. Keys come from clients, so they are scoped by tenant, bounded in length and only ever compared whole.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

MAX_KEY_LENGTH = 128
"""Longer keys are replaced by their digest: a session table must not store what strangers send at length."""

MAX_TTL = 86_400.0
"""Seconds; a caller that asks for more than a day asks for nothing that could be promised."""

_MAX_USER_ID = 4096
_TTL = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_CLAUDE_USER_ID = re.compile(r"_session_([0-9A-Za-z-]{8,64})\Z")


class SessionIdentity(msgspec.Struct, frozen=True):
    """Who sent a request. `key` None: it names no session. `source` is the header or field that named it.

    `tenant` is a digest of the API key ("" without one); equal keys of two tenants are two sessions. `conflicts`: further
    sources, in order, that name another session (grouping ones never do). `final`: the turn is the session's last.
    `ttl`: seconds for which the caller asks its prefix to be kept.
    """

    tenant: str
    key: str | None
    source: str | None = None
    parent: str | None = None
    correlation: str | None = None
    conflicts: tuple[str, ...] = ()
    final: bool = False
    ttl: float | None = None


def tenant_of(api_key: str | None) -> str:
    """The scope of everything a caller stores: a digest of the API key, so that no log or table holds the key itself."""
    if not api_key:
        return ""
    return hashlib.sha256(b"turnkeep-tenant\x00" + api_key.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def scoped_salt(tenant: str, salt: str | None) -> str | None:
    """A caller's cache salt as the KV cache sees it: two tenants who choose the same one share nothing by it."""
    if not salt:
        return None
    if not tenant:
        return salt
    return hashlib.sha256(f"turnkeep-salt\x00{tenant}\x00{salt}".encode("utf-8", "surrogatepass")).hexdigest()


def bounded_key(value: str) -> str:
    """`value` itself, or its digest where it is long or holds what cannot be printed (control characters, lone surrogates)."""
    if len(value) <= MAX_KEY_LENGTH and value.isprintable():
        return value
    return "sha256:" + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def _joined(session: str, branch: str | None) -> str:
    """A conversation inside a session (a sub-agent, a thread) has a prefix, and so a name, of its own."""
    if branch is None or branch == session:
        return session
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in (session, branch))


class _Request:
    """Headers and body behind one lookup that knows what counts as absent."""

    __slots__ = ("_body", "_headers")

    def __init__(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
        self._headers = headers
        self._body = body

    def header(self, name: str) -> str | None:
        value = self._headers.get(name)
        return (value.strip() or None) if value is not None else None

    def field(self, *path: str) -> str | None:
        value: Any = self._body
        for step in path:
            if not isinstance(value, Mapping):
                return None
            value = value.get(step)
        if isinstance(value, str):
            return value.strip() or None
        if isinstance(value, int) and not isinstance(value, bool):
            # Above this, printing an integer costs more than a session name is worth (and CPython refuses at 4300 digits).
            return str(value) if value.bit_length() <= 256 else None
        return None


class Found(NamedTuple):
    """A key and, where the source says so, its parent's key. `parts`: the names that a joined key was made of."""

    key: str
    parent: str | None = None
    parts: tuple[str | None, ...] = ()


def _header(name: str, parent: str | None = None) -> Callable[[_Request], Found | None]:
    def find(request: _Request) -> Found | None:
        key = request.header(name)
        return None if key is None else Found(key, request.header(parent) if parent else None)

    return find


def _field(*path: str, parent: tuple[str, ...] | None = None) -> Callable[[_Request], Found | None]:
    def find(request: _Request) -> Found | None:
        key = request.field(*path)
        return None if key is None else Found(key, request.field(*parent) if parent else None)

    return find


def _claude_code(request: _Request) -> Found | None:
    session = request.header("x-claude-code-session-id")
    if session is None:
        return None
    agent = request.header("x-claude-code-agent-id")
    if agent is None:
        return Found(session)
    parent = _joined(session, request.header("x-claude-code-parent-agent-id"))
    return Found(_joined(session, agent), parent, (session, agent))


def _codex(session_header: str) -> Callable[[_Request], Found | None]:
    """Codex sends the session and, inside it, the thread; HTTP cannot tell its `session-id` from a plain `Session-ID`."""

    def find(request: _Request) -> Found | None:
        session = request.header(session_header)
        if session is None:
            return None
        parent = request.header("x-codex-parent-thread-id")
        thread = request.header("thread-id")
        up = request.header("x-parent-session-id") if parent is None else _joined(session, parent)
        return Found(_joined(session, thread), up, (session, thread))

    return find


def _claude_user_id(request: _Request) -> Found | None:
    """Claude Code packs its session in metadata.user_id: `user_..._account_..._session_ID`, in newer versions as JSON text.
    Any other user id names a person, not a session."""
    user_id = request.field("metadata", "user_id")
    if user_id is None or len(user_id) > _MAX_USER_ID:
        return None
    if user_id.startswith("{"):
        try:
            packed = msgspec.json.decode(user_id)
        except (msgspec.DecodeError, RecursionError):
            return None
        session = packed.get("session_id") if isinstance(packed, dict) else None
        return Found(session) if isinstance(session, str) and session else None
    match = _CLAUDE_USER_ID.search(user_id)
    return Found(match[1]) if match else None


SOURCES: Mapping[str, Callable[[_Request], Found | None]] = {
    "session-id": _codex("session-id"),
    "x-session-id": _header("x-session-id", "x-parent-session-id"),
    "x-claude-code-session-id": _claude_code,
    "session_id": _codex("session_id"),
    "thread-id": _header("thread-id", "x-codex-parent-thread-id"),
    "x-session-affinity": _header("x-session-affinity", "x-parent-session-id"),
    "x-dynamo-session-id": _header("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    "x-smg-routing-key": _header("x-smg-routing-key"),
    "x-litellm-session-id": _header("x-litellm-session-id"),
    "body.session_id": _field("session_id", parent=("parent_session_id",)),
    "body.vllm_xargs.session_id": _field("vllm_xargs", "session_id"),
    "body.agent_hint.session_id": _field("agent_hint", "session_id", parent=("agent_hint", "parent_session_id")),
    "body.prompt_cache_key": _field("prompt_cache_key"),
    "body.metadata.session_id": _field("metadata", "session_id"),
    "body.metadata.user_id": _claude_user_id,
    "correlation-id": _header("correlation-id"),
    "x-correlation-id": _header("x-correlation-id"),
}
"""Every place a session can be named; header names in lower case, body fields with their path."""

DEFAULT_ORDER: tuple[str, ...] = tuple(SOURCES)

_NEEDS: Mapping[str, str] = {name: name.split(".")[1] if name.startswith("body.") else name for name in SOURCES}
"""The header or the field at the top of the body without which a source says nothing."""

GROUPING_SOURCES = frozenset({"x-smg-routing-key", "body.prompt_cache_key", "correlation-id", "x-correlation-id"})
"""Sources whose value several conversations may share by design: a job, a routing or cache hint. Two turns with one such
name are not thereby two tries of one turn."""

_JOBS = frozenset({"correlation-id", "x-correlation-id"})
_FINAL = ("session-final", "x-session-final", "x-dynamo-session-final")
_TRUE = frozenset({"1", "true", "yes", "on"})


def check_order(order: Sequence[str]) -> None:
    """Raises ValueError, naming the setting and the remedy, for an order that cannot be used."""
    for position, name in enumerate(order):
        if name not in SOURCES:
            near = difflib.get_close_matches(name.lower(), SOURCES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(SOURCES)}"
            raise ValueError(f"sessions.sources has no source named {name!r}; {hint}")
        if name in order[:position]:
            raise ValueError(f"sessions.sources names {name!r} twice; remove one of them")


def identify(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    *,
    tenant: str = "",
    order: Sequence[str] = DEFAULT_ORDER,
) -> SessionIdentity:
    """The identity of one request. `headers` must be case-insensitive or have lower-case names; `body` is the parsed JSON.

    Raises KeyError when `order` names a source that is not in `SOURCES`.
    """
    request = _Request(headers, body)
    # Most requests have one or two of twenty: one look at what is there instead of twenty for what may be.
    present = {name.lower() for name in headers}
    group = request.header("correlation-id") or request.header("x-correlation-id") if present & _JOBS else None
    by_header, by_field = _plan(tuple(order))
    places = [by_header[name] for name in present if name in by_header]
    for name in body:
        if name in by_field:
            places += by_field[name]
    first: Found | None = None
    source: str | None = None
    conflicts: list[str] = []
    for place in sorted(places):
        name = order[place]
        if first is not None and name in GROUPING_SOURCES:
            continue
        found = SOURCES[name](request)
        if found is None:
            continue
        if first is None:
            first, source = found, name
        elif found.key != first.key and found.key not in first.parts:
            conflicts.append(name)
    return SessionIdentity(
        tenant=tenant,
        key=None if first is None else bounded_key(first.key),
        source=source,
        parent=bounded_key(first.parent) if first is not None and first.parent and first.parent != first.key else None,
        correlation=bounded_key(group) if group else None,
        conflicts=tuple(conflicts),
        final=first is not None and not present.isdisjoint(_FINAL) and _is_final(request),
        ttl=_ttl(body),
    )


@functools.lru_cache(maxsize=16)
def _plan(order: tuple[str, ...]) -> tuple[Mapping[str, int], Mapping[str, Sequence[int]]]:
    """Where in an order the sources stand that read a header, and those that read a field at the top of the body."""
    by_header: dict[str, int] = {}
    by_field: dict[str, list[int]] = {}
    for place, name in enumerate(order):
        needed = _NEEDS[name]
        if name.startswith("body."):
            by_field.setdefault(needed, []).append(place)
        else:
            by_header[needed] = place
    return by_header, by_field


def _is_final(request: _Request) -> bool:
    for name in _FINAL:
        value = request.header(name)
        if value is not None:
            return value.lower() in _TRUE
    return False


def _ttl(body: Mapping[str, Any]) -> float | None:
    """agent_hint.cache_control.ttl in seconds: a number, or a number with s, m or h (Anthropic writes "5m" and "1h")."""
    hint = body.get("agent_hint")
    control = hint.get("cache_control") if isinstance(hint, Mapping) else None
    ttl = control.get("ttl") if isinstance(control, Mapping) else None
    if isinstance(ttl, str):
        match = _TTL.fullmatch(ttl.strip())
        if match is None:
            return None
        ttl = float(match[1]) * _UNITS[match[2]]
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= MAX_TTL:
        return None
    return float(ttl)
