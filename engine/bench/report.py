"""A run's outcome, as data for --json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.bench.machine import Machine
from engine.bench.measure import Overhead, Rate, Row


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run of `turnkeep bench engine` found. `settings`: of the engine; `peers`: name -> version and
    settings."""

    settings: dict[str, Any]
    machine: Machine
    peers: dict[str, dict[str, Any]]
    rows: list[Row]
    overheads: list[Overhead]

    def as_json(self) -> dict[str, Any]:
        """JSON values. Rates are tokens, bandwidths bytes and matrix rates operations a second; times are seconds."""
        return {
            "settings": self.settings,
            "machine": {
                "threads": self.machine.threads,
                "memory_bandwidth": self.machine.memory_bandwidth,
                "reads": [{"size": read.size, "bandwidth": read.bandwidth} for read in self.machine.reads],
                "matrix_rates": self.machine.rates,
                "origin": self.machine.origin,
            },
            "peers": self.peers,
            "rows": [_row(row) for row in self.rows],
            "step_overhead": [
                {"batch": overhead.batch, "overhead": overhead.overhead, "step": overhead.step} for overhead in self.overheads
            ],
        }


def _row(row: Row) -> dict[str, Any]:
    return {
        "work": row.work.name,
        "kind": row.work.kind,
        "tokens": row.work.tokens,
        "rate": _rate(row.own),
        "seconds": row.work.tokens / row.own.median,
        "roofline": row.roofline,
        "bound": row.bound,
        "share": row.share,
        "disturbance": row.disturbance,
        "foreign": row.foreign,
        "peers": {name: {**_rate(rate), "ratio": row.ratio(name)} for name, rate in row.peers.items()},
    }


def _rate(rate: Rate) -> dict[str, Any]:
    return {"median": rate.median, "spread": rate.spread, "turns": list(rate.turns)}
