"""What an engine needs of whatever moves its blocks: `offload.transfers` and `offload.keeper`, or the same in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.tickets import LoadTicket
from offload.transfers import Filled, TransferCounts
from prefix_cache.events import KVEvent
from prefix_cache.hashing import BlockHash


class Mover(Protocol):
    """See `offload.transfers.Transfers`."""

    @property
    def counts(self) -> TransferCounts: ...

    @property
    def has_finished(self) -> bool: ...

    def load(self, ticket: LoadTicket) -> None: ...

    def fetch(self, ticket: LoadTicket) -> None: ...

    def store(self, filled: Sequence[Filled]) -> None: ...

    def computing(self, is_computing: bool) -> None: ...

    def promote(self, digests: Sequence[BlockHash]) -> None: ...

    def finished(self) -> list[LoadTicket]: ...

    def wait_idle(self, timeout: float) -> bool: ...

    def close(self) -> None: ...


class Keeper(Protocol):
    """See `offload.keeper.TierKeeper`."""

    def mark(self, digests: Sequence[BlockHash], standing: int, *, expected: float = 0.0, session: int = 0) -> None: ...

    def at(self, when: float, work: Callable[[], None]) -> None: ...

    def take_events(self) -> list[KVEvent]: ...

    def take_missing(self) -> list[BlockHash]: ...

    def snapshot(self) -> dict[str, bytes]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Movers:
    """Both. Made with what they call when there is something new, and ask whether somebody waits for time to pass."""

    mover: Mover
    keeper: Keeper


MakeMovers = Callable[[Callable[[], None], Callable[[], bool]], Movers]
