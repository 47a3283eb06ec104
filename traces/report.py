"""What a replay measured, as JSON with the keys of `vllm bench serve`, and as a table of several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from traces.replay import ReplayResult
from traces.unlimited_cache import Bound


@dataclass(frozen=True, slots=True)
class Run:
    """One replay under its name. `bound` None: not known."""

    name: str
    result: ReplayResult
    bound: Bound | None = None

    @property
    def share_of_unlimited(self) -> float | None:
        """Cached tokens over those one unlimited cache would give; None while turns are missing or a figure is not known."""
        if self.bound is None or not self.bound.cached_tokens or self.result.failed or self.result.cached_share is None:
            return None
        return self.result.cached_tokens / self.bound.cached_tokens

    def per_second(self, count: float) -> float:
        return count / self.result.duration if self.result.duration > 0 else 0.0


def to_json(run: Run) -> dict[str, Any]:
    """Keys of `vllm bench serve` where they apply (times in ms, rates per second), then ours."""
    result = run.result
    values: dict[str, Any] = {
        "name": run.name,
        "duration": result.duration,
        "completed": result.completed,
        "failed": result.failed,
        "total_input_tokens": result.prompt_tokens,
        "total_output_tokens": result.output_tokens,
        "request_throughput": run.per_second(result.completed),
        "request_goodput": run.per_second(result.good) if result.goodput.limited else None,
        "output_throughput": run.per_second(result.output_tokens),
        "total_token_throughput": run.per_second(result.prompt_tokens + result.output_tokens),
    }
    for name, samples in (("ttft", result.ttft), ("tpot", result.tpot), ("itl", result.itl), ("e2el", result.e2el)):
        values[f"mean_{name}_ms"] = samples.mean * 1000
        values[f"median_{name}_ms"] = samples.percentile(50) * 1000
        values[f"std_{name}_ms"] = samples.std * 1000
        for q in (50, 90, 99):
            values[f"p{q}_{name}_ms"] = samples.percentile(q) * 1000
    return values | {
        "sessions": result.sessions,
        "cached_tokens": result.cached_tokens if result.cached_share is not None else None,
        "cached_share": result.cached_share,
        "unlimited_cache_tokens": run.bound.cached_tokens if run.bound else None,
        "unlimited_cache_share": run.bound.cached_share if run.bound else None,
        "share_of_unlimited": run.share_of_unlimited,
        "turns_per_worker": dict(sorted(result.workers.items())),
        "errors": result.errors,
    }


Figure = Callable[[Run], float | None]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _rate(value: float) -> str:
    return f"{value:,.1f}"


def _milliseconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms"


def _time(samples: str, q: float) -> Figure:
    def figure(run: Run) -> float | None:
        measured = getattr(run.result, samples)
        return measured.percentile(q) if measured.count else None

    return figure


FIGURES: tuple[tuple[str, Figure, Callable[[float], str]], ...] = (
    ("turns", lambda run: run.result.completed, _count),
    ("failed", lambda run: run.result.failed or None, _count),
    ("prompt tokens", lambda run: run.result.prompt_tokens, _count),
    ("output tokens", lambda run: run.result.output_tokens, _count),
    ("cached share", lambda run: run.result.cached_share, _percent),
    ("one unlimited cache", lambda run: run.bound.cached_share if run.bound else None, _percent),
    ("share of unlimited", lambda run: run.share_of_unlimited, _percent),
    ("TTFT p50", _time("ttft", 50), _milliseconds),
    ("TTFT p90", _time("ttft", 90), _milliseconds),
    ("TTFT p99", _time("ttft", 99), _milliseconds),
    ("ITL p50", _time("itl", 50), _milliseconds),
    ("ITL p99", _time("itl", 99), _milliseconds),
    ("output tokens/s", lambda run: run.per_second(run.result.output_tokens), _rate),
    ("tokens/s", lambda run: run.per_second(run.result.prompt_tokens + run.result.output_tokens), _rate),
    (
        "goodput turns/s",
        lambda run: run.per_second(run.result.good) if run.result.goodput.limited else None,
        lambda value: f"{value:.2f}",
    ),
    ("duration", lambda run: run.result.duration, lambda value: f"{value:,.1f} s"),
)
"""Name, figure, and how it is written. A row without any figure is left out."""


def table(runs: Sequence[Run], title: str | None = None) -> Table:
    """Figures down, runs across; with several runs a column with the ratio of the last to the first."""
    view = Table(title=title, title_justify="left")
    view.add_column("")
    for run in runs:
        view.add_column(run.name, justify="right")
    if len(runs) > 1:
        view.add_column("ratio", justify="right")
    for name, figure, write in FIGURES:
        values = [figure(run) for run in runs]
        if all(value is None for value in values):
            continue
        cells = ["—" if value is None else write(value) for value in values]
        if len(runs) > 1:
            first, last = values[0], values[-1]
            cells.append("" if first is None or last is None or first == 0 else f"{last / first:.2f}×")
        view.add_row(name, *cells)
    return view
