"""Rendezvous hashing (Thaler, Ravishankar 1996): gateways that see the same workers agree where a session belongs, with nothing
shared between them, and a worker that goes moves its own sessions only.

A session is known by tenant and name; one without a name by the last full block of its first prompt, so that a first turn that
is tried again at another gateway goes where it went before. Its later turns are found by residency. Workers are known by their
instance, which they tell every gateway alike; names are each gateway's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash


def session_key(session: tuple[str, str]) -> bytes:
    """Of (tenant, name). Two parts, so that no two pairs are confused."""
    return "".join(f"{len(part)}:{part}" for part in session).encode("utf-8", "surrogatepass")


def prompt_key(tenant: str, digests: Sequence[bytes]) -> bytes | None:
    """Of a prompt's beginning: its last full block, under which it can be told from others that begin as it does. None for a
    prompt of less than a block."""
    if not digests:
        return None
    return f"{len(tenant)}:{tenant}".encode("utf-8", "surrogatepass") + digests[-1]


def score(key: bytes, worker: str) -> int:
    """The worker with the highest score for a key is the one; the next highest follows when it is gone."""
    return int(xxhash.xxh3_64_intdigest(key + b"|" + worker.encode("utf-8", "surrogatepass")))
