"""API keys: who may use the gateway, which tenant they are, and who may administer it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from aiohttp import web

from gateway.access.config import AuthConfig
from gateway.access.entries import KeyEntry, PriorityClass, digest_of, parse_entry, read_key_file
from gateway.access.watched_file import WatchedFile
from gateway.turn import TurnError
from sessions.identity import tenant_of

log = logging.getLogger(__name__)

MAX_KEY_BYTES = 4096
ADMINISTRATION = web.AppKey("administration", bool)
"""True in the application that is served on the port for administration."""

_MISSED_LOOKS = 3  # a file that is being replaced may be away for a moment
_LOOK_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `tenant`: the scope of what it stores. `key`: a name for the key, of which nothing can be learned
    about it; "" without one. `known`: it is one of the gateway's keys. Limits are per minute, 0: none."""

    tenant: str
    key: str = ""
    known: bool = False
    admin: bool = False
    priority: PriorityClass = "high"
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0


class ApiKeys:
    """Checks the key of a request. Only digests are kept. They are found through a keyed hash that is new in every process,
    and compared in constant time, so that how long a refusal takes says nothing about them."""

    def __init__(self, config: AuthConfig) -> None:
        """Raises ValueError for keys or a key file that cannot be used."""
        self._config = config
        self._secret = secrets.token_bytes(32)
        self._fixed = tuple(parse_entry(text) for text in config.keys)
        self._entries: dict[bytes, KeyEntry] = {}
        self._file = WatchedFile(config.key_file) if config.key_file is not None else None
        if self._file is not None:
            self._file.changed()
        self._load()
        # Most gateways without keys are asked by callers without one.
        self._nobody = Caller(
            tenant_of(None),
            requests_per_minute=config.requests_per_minute,
            tokens_per_minute=config.tokens_per_minute,
        )

    @property
    def required(self) -> bool:
        """False when no keys are set: then everybody may come in."""
        return self._config.restricted

    @property
    def open_metrics(self) -> bool:
        """Whether everybody may read the metrics."""
        return self._config.open_metrics or not self.required

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request with these (case-insensitive) headers. Raises TurnError 401."""
        return self.caller(headers).tenant

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sent a request with these headers. Raises TurnError 401."""
        key = presented_key(headers)
        if not self.required:
            if key is None:
                return self._nobody
            return Caller(
                tenant_of(key),
                self._name(digest_of(key)),
                requests_per_minute=self._config.requests_per_minute,
                tokens_per_minute=self._config.tokens_per_minute,
            )
        if key is None:
            raise TurnError(
                401,
                "missing_api_key",
                "This gateway needs an API key. Send it as 'Authorization: Bearer KEY' or in x-api-key.",
            )
        digest = digest_of(key)
        entry = self._entries.get(self._place(digest))
        if entry is None or not hmac.compare_digest(digest, entry.digest):
            raise TurnError(401, "invalid_api_key", "The API key is not one of this gateway's. Check it for typing errors.")
        requests, tokens = entry.requests_per_minute, entry.tokens_per_minute
        return Caller(
            tenant_of(key) if entry.tenant is None else named_tenant(entry.tenant),
            self._name(digest),
            known=True,
            admin=entry.admin,
            priority=entry.priority,
            requests_per_minute=self._config.requests_per_minute if requests is None else requests,
            tokens_per_minute=self._config.tokens_per_minute if tokens is None else tokens,
        )

    def require_admin(self, request: web.Request) -> None:
        """Returns when a request may administer the gateway: it came over the port for that, or with an admin key, or, where
        there are no keys, from this machine and from no web page. Raises TurnError 401, 403."""
        if request.app.get(ADMINISTRATION, False):
            return
        if self.required:
            if not self.caller(request.headers).admin:
                raise TurnError(
                    403,
                    "admin_only",
                    "This needs a key that the key file marks 'admin', or the port for administration.",
                )
            return
        if self._config.admin_port is not None or not _is_local(request.remote) or "Origin" in request.headers:
            raise TurnError(
                403,
                "admin_only",
                "This is for administrators: ask from the gateway's own machine, or over the port that --admin-port opens, or "
                "start the gateway with an admin key (`turnkeep keys new --admin`).",
            )

    def require_name(self, request: web.Request) -> None:
        """Returns when a key may say whose things a request asks for: the port for administration asks for none. Raises
        TurnError 400."""
        if self.required and request.app.get(ADMINISTRATION, False) and presented_key(request.headers) is None:
            raise TurnError(
                400,
                "missing_tenant",
                "This port asks for no key that would say whose these are. Name a tenant with ?tenant=ID; /v1/routes takes "
                "?tenant=* for all.",
                param="tenant",
            )

    async def follow(self, _app: web.Application) -> AsyncIterator[None]:
        """For `Application.cleanup_ctx`: takes over changes of the key file while the application runs."""
        watching = asyncio.create_task(self._watch()) if self._file is not None else None
        yield
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        while self._file is not None:
            await asyncio.sleep(_LOOK_EVERY)
            if await asyncio.to_thread(self._file.changed):
                try:
                    await asyncio.to_thread(self._load)
                except ValueError as error:
                    log.error("%s; the keys that were read before stay in force", error)
                else:
                    log.info("the API key file was read again: %d keys", len(self._entries))
            elif self._file.missed == _MISSED_LOOKS:
                log.error("the API key file %s is gone; the keys that were read before stay in force", self._file.path)

    def _load(self) -> None:
        entries: Iterable[KeyEntry] = self._fixed
        if self._config.key_file is not None:
            entries = (*self._fixed, *read_key_file(self._config.key_file))
        self._entries = {self._place(entry.digest): entry for entry in entries}

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()

    def _name(self, digest: bytes) -> str:
        """The same in every gateway, so that they can count together."""
        return hashlib.sha256(b"turnkeep-key-name\x00" + digest).hexdigest()[:16]


def named_tenant(name: str) -> str:
    """The scope of a tenant that the key file names. Apart from those of keys by themselves, which are hexadecimal."""
    return f"@{name}"


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key a request carries, in the way of either dialect; None without one."""
    authorization = headers.get("Authorization")
    if authorization is not None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()[:MAX_KEY_BYTES]
    key = headers.get("x-api-key")
    return None if key is None else key.strip()[:MAX_KEY_BYTES] or None


def _is_local(remote: str | None) -> bool:
    """Whether an address is this machine's own; a unix socket has none."""
    if not remote:
        return True
    try:
        address = ipaddress.ip_address(remote.split("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
