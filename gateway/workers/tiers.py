"""What a worker says of the tiers below its device, as the pool shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.workers.protocol import TierStats, WorkerStats
from prefix_cache.events import DISK, HOST

OTHER = "other"
_REMOTE = "remote"
_NAMES = (HOST, DISK, _REMOTE)


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier. `blocks`, bytes, `stored`, `evicted` and `healed` (damaged, thrown away) are of all who share it, `users` of
    them on the worker's machine; hits, errors and `seconds_per_block` (to load one, measured) are the worker's own."""

    name: str
    blocks: int
    used_bytes: int
    max_bytes: int
    users: int
    seconds_per_block: float
    hit_tokens: int
    stored_blocks: int
    evicted_blocks: int
    healed_blocks: int
    errors: int


@dataclass(frozen=True, slots=True)
class OffloadView:
    """The tiers of one worker, and what came of deciding what stays in them; counts are since its start.

    `lost_blocks`: a session came back for them, and they had been given up everywhere. `prefetched_blocks`: brought into host
    memory before anybody asked, `useless_prefetches` of them in vain. `fetched_blocks`: brought onto the device before their
    session was back, of which `useful_fetches` were there when it was, and `useless_fetches` were not.
    """

    tiers: tuple[TierView, ...]
    lost_blocks: int
    prefetched_blocks: int
    useless_prefetches: int
    fetched_blocks: int
    useful_fetches: int
    useless_fetches: int


def offload_view(stats: WorkerStats | None) -> OffloadView | None:
    """None for a worker that reports no tiers."""
    if stats is None or not stats.tiers:
        return None
    return OffloadView(
        tiers=tuple(_tier(name, tiers) for name, tiers in _by_name(stats.tiers).items()),
        lost_blocks=stats.lost_blocks_total,
        prefetched_blocks=stats.prefetched_blocks_total,
        useless_prefetches=stats.useless_prefetches_total,
        fetched_blocks=stats.fetched_blocks_total,
        useful_fetches=stats.useful_fetches_total,
        useless_fetches=stats.useless_fetches_total,
    )


def _by_name(tiers: Iterable[TierStats]) -> dict[str, list[TierStats]]:
    """Names become labels, so those that are not known are one, whatever a worker says."""
    found: dict[str, list[TierStats]] = {}
    for tier in tiers:
        found.setdefault(tier.name if tier.name in _NAMES else OTHER, []).append(tier)
    return found


def _tier(name: str, tiers: list[TierStats]) -> TierView:
    return TierView(
        name=name,
        blocks=sum(tier.blocks for tier in tiers),
        used_bytes=sum(tier.used_bytes for tier in tiers),
        max_bytes=sum(tier.max_bytes for tier in tiers),
        users=max(tier.users for tier in tiers),
        seconds_per_block=max(tier.seconds_per_block for tier in tiers),
        hit_tokens=sum(tier.hit_tokens_total for tier in tiers),
        stored_blocks=sum(tier.stored_blocks_total for tier in tiers),
        evicted_blocks=sum(tier.evicted_blocks_total for tier in tiers),
        healed_blocks=sum(tier.healed_blocks_total for tier in tiers),
        errors=sum(tier.errors_total for tier in tiers),
    )
