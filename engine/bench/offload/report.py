"""What `turnkeep bench offload` is asked for, what it finds, and what it should find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.bench.offload.rates import Rates
from engine.bench.offload.workload import Session

UNLIMITED, PLAIN, OURS = "unlimited", "LRU, computed again", "tiers"

MEASURES = ("rates", "stores", "restart", "worth", "pools", "overload", "shared")


@dataclass(frozen=True, slots=True)
class OffloadBench:
    """What is measured and with what. `twice`: as many sessions again as `sessions`, those among them, but for their gaps.
    `gap`, `twice_gap`: the mean gaps of both. `shares`: of the working set of `sessions` that the pool holds. Times in seconds;
    `budget`: for all of it, None for as long as it takes."""

    directory: Path
    sessions: Sequence[Session]
    twice: Sequence[Session]
    gap: float
    twice_gap: float
    shares: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    turn_tokens: int = 6000
    decode_tokens: int = 128
    repeats: int = 3
    rate_bytes: int = 512 << 20
    measures: tuple[str, ...] = MEASURES
    budget: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One side with one pool. `share`: asked for; `blocks`: what it was, since a pool holds the largest turn at least. Seconds;
    first tokens are those of all turns, completions run from a session's first turn to the end of its last.
    `busy`: share of the time in forward passes; near 1 everybody waits for the machine, whatever the pool. `others`: share of
    all processors that other processes took meanwhile; sides of which it is not about the same cannot be compared."""

    share: float
    side: str
    blocks: int
    sessions: int
    first_token_p50: float
    first_token_p99: float
    mean_completion: float
    p95_completion: float
    tokens_per_second: float
    cached_share: float
    computed_tokens: int
    held: int = 0
    pauses: int = 0
    busy: float = 0.0
    others: float = 0.0


@dataclass(frozen=True, slots=True)
class WorthRow:
    """The same turns loaded or computed, by what was found faster, and computed without tiers; seconds to the first token.
    `computing_a_block`: seconds, of which the medium's delay was made. `loaded_share`: of the prompts' tokens."""

    medium: str
    computing_a_block: float
    turns: int
    computed_p50: float
    computed_mean: float
    tiers_p50: float
    tiers_mean: float
    loaded_share: float

    @property
    def p50_ratio(self) -> float:
        return self.tiers_p50 / self.computed_p50

    @property
    def mean_ratio(self) -> float:
        return self.tiers_mean / self.computed_mean


@dataclass(frozen=True, slots=True)
class Target:
    """What should come out: `value` at least `bound`, or at most where `at_most`."""

    name: str
    value: float
    bound: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound


@dataclass(slots=True)
class OffloadReport:
    """Every figure was measured in this run; None, or no row: not asked for, or `missing` says why."""

    block_bytes: int
    working_set: int
    rates: Rates | None = None
    decode_with_stores: float | None = None
    decode_without: float | None = None
    store_processor_share: float | None = None
    restart_computed: float | None = None
    restart_loaded: float | None = None
    restart_cached: int | None = None
    worth: list[WorthRow] = field(default_factory=list)
    unlimited: Row | None = None
    pools: list[Row] = field(default_factory=list)
    overload: list[Row] = field(default_factory=list)
    shared_arena: float | None = None
    private_arenas: float | None = None
    missing: dict[str, str] = field(default_factory=dict)
    failed: bool = False

    def targets(self) -> Iterator[Target]:
        """Those of what was measured."""
        rates = self.rates
        if rates is not None:
            yield Target("load from the host tier, of memcpy", rates.host_load / rates.memcpy, 0.6)
            yield Target("load from disk, cold, of a sequential read", rates.disk_load / rates.sequential_read, 0.6)
        if self.decode_with_stores is not None and self.decode_without is not None:
            lost = 1 - self.decode_with_stores / self.decode_without
            yield Target("decoding lost to stores", lost, 0.03, at_most=True)
        if self.restart_computed is not None and self.restart_loaded is not None:
            yield Target("first token after a restart, times faster", self.restart_computed / self.restart_loaded, 5)
        for row in self.worth:
            yield Target(
                f"load or recompute, {row.medium}: mean first token, of recomputing's", row.mean_ratio, 1.05, at_most=True
            )
        for share, plain, ours in pairs(self.pools):
            if share == 0.25:
                if self.unlimited is not None:
                    ratio = ours.first_token_p50 / self.unlimited.first_token_p50
                    yield Target("pool at 0.25: first token p50, of an unlimited pool's", ratio, 1.3, at_most=True)
                better = plain.first_token_p99 / ours.first_token_p99
                yield Target("pool at 0.25: first token p99, times better than LRU", better, 3)
        for share, plain, ours in pairs(self.overload):
            faster = plain.mean_completion / ours.mean_completion
            yield Target(f"twice the sessions, pool at {share:g}: mean completion, times better", faster, 2)
            rate = ours.tokens_per_second / plain.tokens_per_second
            yield Target(f"twice the sessions, pool at {share:g}: throughput, of LRU's", rate, 1)
        if self.shared_arena is not None and self.private_arenas is not None:
            more = self.shared_arena - self.private_arenas
            yield Target("cached share that one arena has more than two halves", more, 1e-9)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        targets = [{**asdict(target), "reached": target.reached} for target in self.targets()]
        return {**asdict(self), "targets": targets}


def pairs(rows: Sequence[Row]) -> Iterator[tuple[float, Row, Row]]:
    """(share, LRU computed again, ours), the largest share first; of shares that have both."""
    by_side = {(row.share, row.side): row for row in rows}
    for share in sorted({row.share for row in rows}, reverse=True):
        plain, ours = by_side.get((share, PLAIN)), by_side.get((share, OURS))
        if plain is not None and ours is not None:
            yield share, plain, ours
