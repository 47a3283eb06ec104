"""API keys: who may use the gateway, and which tenant they are."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from gateway.turn import TurnError
from sessions.identity import tenant_of

MAX_KEY_BYTES = 4096


def read_key_file(path: Path) -> tuple[str, ...]:
    """One key a line; empty lines and lines that begin with # are skipped. Raises ValueError with a sentence."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the API key file {path} cannot be read: {error}") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise ValueError(f"the API key file {path} holds no key; write one a line")
    return keys


class ApiKeys:
    """Checks the key of a request. Only digests are kept, and every one is compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(sorted({_digest(key) for key in keys}))

    @property
    def required(self) -> bool:
        """False when no keys are set: then everybody may come in."""
        return bool(self._digests)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request with these (case-insensitive) headers. Raises TurnError 401."""
        key = presented_key(headers)
        if self.required:
            if key is None:
                raise TurnError(
                    401,
                    "missing_api_key",
                    "This gateway needs an API key. Send it as 'Authorization: Bearer KEY' or in x-api-key.",
                )
            presented = _digest(key)
            matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
            if not any(matches):
                raise TurnError(401, "invalid_api_key", "The API key is not one of this gateway's. Check it for typing errors.")
        return tenant_of(key)


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key a request carries, in the way of either dialect; None without one."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()[:MAX_KEY_BYTES]
    return headers.get("x-api-key", "").strip()[:MAX_KEY_BYTES] or None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
