"""What block traces have in common: no text, only how long prompts are and which of their blocks are the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from prefix_cache.hashing import JoinedDigests


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """`after`: seconds from the end of the session's previous request (its start, for the first). `digests`: of the prompt's
    full blocks, where equal ones are equal contents behind equal beginnings."""

    after: float
    prompt_tokens: int
    output_tokens: int
    digests: JoinedDigests


@dataclass(frozen=True, slots=True)
class BlockSession:
    """Requests that follow each other. `start`: seconds from the beginning of the trace. `parent`: the session that began
    it."""

    name: str
    start: float
    requests: tuple[BlockRequest, ...]
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """`block_size` in tokens. `open_loop`: requests come at their times, whatever became of those before."""

    name: str
    block_size: int
    sessions: tuple[BlockSession, ...]
    open_loop: bool = False

    @property
    def requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)

    def working_set(self) -> int:
        """Distinct blocks of all prompts."""
        return len({digest for session in self.sessions for request in session.requests for digest in request.digests})


def digests_of(scope: str, ids: Iterable[int]) -> JoinedDigests:
    """Digests for the ids that a trace gives its blocks; `scope`: within which equal ids mean equal blocks."""
    return JoinedDigests(b"".join(xxhash.xxh3_128_digest(f"{scope} {number}".encode()) for number in ids))
