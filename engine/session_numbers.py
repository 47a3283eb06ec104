"""How the engine names sessions."""

from __future__ import annotations

import xxhash


def session_number(tenant: str, session: str | None) -> int:
    """31 bits that stand for a session of a tenant, never 0; 0 for none."""
    if session is None:
        return 0
    return xxhash.xxh3_64_intdigest(f"{tenant}\x00{session}".encode("utf-8", "surrogatepass")) >> 33 | 1
