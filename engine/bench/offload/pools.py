"""Measures of sessions against pools that do not hold them, each side taking its turn on the same sessions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.bench.offload.budget import Budget
from engine.bench.offload.engines import Engines
from engine.bench.offload.replay import Outcome, replay
from engine.bench.offload.report import OURS, PLAIN, UNLIMITED, OffloadBench, OffloadReport, Row
from engine.bench.offload.workload import Session, largest
from engine.bench.processor import OtherProcesses
from engine.engine import Engine
from offload.config import OffloadConfig
from prefix_cache.eviction import LRUPolicy


class Pools:
    """`pools`: sessions that fit the tiers. `overload`: twice as many as fit. `shared`: sessions that move between replicas."""

    def __init__(self, engines: Engines, bench: OffloadBench, report: OffloadReport, shared: Path, budget: Budget) -> None:
        self._engines = engines
        self._bench = bench
        self._report = report
        self._shared = shared
        self._budget = budget
        self._longest = max(len(session.prompts[-1]) for session in bench.twice) + 64
        # The quarter first, by which most is judged, if time runs short.
        self._shares = sorted(bench.shares, key=lambda share: (share != 0.25, -share))

    def pools(self) -> None:
        """The unlimited pool, then each share of the working set: a host tier for all, and LRU that computes again. What is
        compared most closely comes one after the other, since a machine is rarely as busy ten minutes later."""
        report, sessions, gap = self._report, self._bench.sessions, self._bench.gap
        least = largest(sessions, self._engines.block_size)
        whole = report.working_set + report.working_set // 8 + least
        report.unlimited = self._row(0.0, UNLIMITED, whole, sessions, gap, None)
        for share in self._shares:
            blocks = max(least, int(share * report.working_set))
            for side in (OURS, PLAIN):
                host = 2 * whole if side == OURS else 0
                report.pools.append(self._row(share, side, blocks, sessions, gap, host))

    def overload(self) -> None:
        """Twice as many sessions as the host tier holds."""
        report = self._report
        least = largest(self._bench.twice, self._engines.block_size)
        for share in self._shares:
            blocks = max(least, int(share * report.working_set))
            for side in (PLAIN, OURS):
                host = report.working_set if side == OURS else 0
                row = self._row(share, side, blocks, self._bench.twice, self._bench.twice_gap, host)
                report.overload.append(row)

    def shared(self) -> None:
        """Two replicas whose sessions move between them at each turn: one arena of a size, or two of half of it."""
        blocks = max(largest(self._bench.sessions, self._engines.block_size), self._report.working_set // 8)
        arena = max(2, self._report.working_set) * self._engines.block_bytes
        shares = []
        for what, folders, each in (("one arena", ("one", "one"), arena), ("two halves", ("left", "right"), arena // 2)):
            self._budget.began(f"moved sessions, {what}")
            made = []
            for folder in folders:
                below = self._shared / folder
                below.mkdir(exist_ok=True)
                made.append(self._make(blocks, OURS, OffloadConfig(host_bytes=each, shared_memory=below)))
            shares.append(self._replay(made, self._bench.sessions, self._bench.gap, hints=True, move=True).cached_share)
        self._report.shared_arena, self._report.private_arenas = shares

    def _row(self, share: float, side: str, blocks: int, sessions: Sequence[Session], gap: float, host: int | None) -> Row:
        pool = "an unlimited pool" if side == UNLIMITED else f"pool at {share:g}"
        self._budget.began(f"{len(sessions)} sessions, {pool}: {side}")
        offload = None
        if host:
            offload = OffloadConfig(host_bytes=host * self._engines.block_bytes, shared_memory=self._shared)
        engine = self._make(blocks, side, offload)
        others = OtherProcesses()
        outcome = self._replay([engine], sessions, gap, hints=side != PLAIN)
        return Row(
            share,
            side,
            blocks,
            len(sessions),
            outcome.first_token(0.5),
            outcome.first_token(0.99),
            outcome.mean_completion,
            outcome.completion(0.95),
            outcome.rate,
            outcome.cached_share,
            outcome.prompt_tokens - outcome.cached_tokens,
            outcome.held,
            outcome.pauses,
            outcome.computing / outcome.seconds if outcome.seconds else 0.0,
            others.share(),
        )

    def _make(self, blocks: int, side: str, offload: OffloadConfig | None) -> Engine:
        if side == PLAIN:
            return self._engines.make(blocks, self._longest, eviction=LRUPolicy(), policy="fcfs")
        return self._engines.make(blocks, self._longest, offload)

    def _replay(
        self, engines: Sequence[Engine], sessions: Sequence[Session], gap: float, *, hints: bool, move: bool = False
    ) -> Outcome:
        turns = sum(len(session.prompts) for session in sessions)
        return replay(
            engines,
            sessions,
            gap,
            hints=hints,
            move=move,
            timeout=self._budget.left,
            on_turn=lambda done: self._budget.progress(f"{done} of {turns} turns"),
        )
