"""How long a tool takes, from how long it took: gaps by tenant and tool, and what they predict."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sessions.gaps.histogram import MAX_SECONDS, DecayedHistogram, bucket_of
from sessions.identity import bounded_key

NO_TOOL = ""
"""Stands for turns that called nothing: the gap is a person's, or another agent's."""

_NONE = (NO_TOOL,)

ALL_TOOLS = "\x00"
"""Stands for the tools of a tenant together; no tool can be called so, as names are printable here."""

_SHARES = (0.5, 0.9)

MAX_CALLS = 64
"""Names of one turn that are looked at."""

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class GapConfig:
    """`half_life`: seconds after which a gap counts half. `max_tools`: names remembered, of all tenants;
    `max_tools_per_tenant`: of one, so that it cannot push out the others'. `max_waiting`: sessions whose next turn is
    waited for. `min_weight`: gaps below which a tool's own say less than those of all tools of its tenant."""

    half_life: float = 6 * 3600.0
    max_tools: int = 10_000
    max_tools_per_tenant: int = 512
    max_waiting: int = 100_000
    min_weight: float = 3.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.half_life < math.inf:
            raise ValueError(f"gaps.half_life must be at least 1 second, not {self.half_life}")
        for name in ("max_tools", "max_tools_per_tenant", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"gaps.{name} must be at least 1, not {getattr(self, name)}")
        if not self.min_weight >= 0:
            raise ValueError(f"gaps.min_weight must be at least 0, not {self.min_weight}")


class GapPrediction(NamedTuple):
    """When a session will be back, in seconds after the end of its turn: half of the time before `p50`, nine times of ten
    before `p90`. `weight`: gaps that say so. `basis`: the tool's own (`tool`), or all of the tenant's (`tenant`)."""

    p50: float
    p90: float
    weight: float
    basis: str


@dataclass(frozen=True, slots=True)
class GapRow:
    """What is known of a tool. `tool` NO_TOOL: of turns that called none. `observed`: gaps of this process, ever."""

    tool: str
    weight: float
    observed: int
    p50: float
    p90: float
    p99: float


@dataclass(slots=True)
class _Tool:
    histogram: DecayedHistogram
    observed: int = 0


class ToolGapModel:
    """Gaps by tenant and tool, least recently used first out. Times are of `clock`, which must not step back; where it does,
    time stands still. Use on one thread."""

    def __init__(self, config: GapConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._tools: OrderedDict[Key, _Tool] = OrderedDict()
        self._per_tenant: Counter[str] = Counter()
        self._unsent: dict[Key, dict[int, float]] | None = None

    def __len__(self) -> int:
        return len(self._tools)

    def observe(self, tenant: str, tools: Sequence[str], seconds: float) -> tuple[str, ...]:
        """A session came back after `seconds` from a turn that called `tools` (in parallel; empty: none).

        A gap is as long as the slowest call. It is booked on the tools that nothing is known of yet, else on the one that
        is expected to be slowest: quick tools that run beside a slow one stay quick. Returns the names it was booked on.
        """
        if not 0 <= seconds < math.inf:
            return ()
        seconds = min(seconds, MAX_SECONDS)
        booked = self._to_blame(tenant, _names(tools))
        for name in booked:
            self._book(tenant, name, seconds)
        if booked != (NO_TOOL,):
            self._book(tenant, ALL_TOOLS, seconds)
        return booked

    def predict(self, tenant: str, tools: Sequence[str]) -> GapPrediction | None:
        """When a session that called `tools` will be back; None when nothing is known. Of several calls, the slowest counts."""
        now = self._clock()
        slowest: GapPrediction | None = None
        for name in _names(tools):
            found = self._predict(tenant, name, now)
            if found is not None and (slowest is None or found.p50 > slowest.p50):
                slowest = found
        return slowest

    def rows(self, tenant: str, *, tool: str | None = None) -> list[GapRow]:
        """What is known of a tenant's tools, those with most gaps first; of one, where `tool` is given."""
        now = self._clock()
        rows = []
        for (owner, name), known in self._tools.items():
            if owner != tenant or name == ALL_TOOLS or (tool is not None and name != tool):
                continue
            quantiles = known.histogram.quantiles((0.5, 0.9, 0.99))
            if quantiles is not None:
                rows.append(GapRow(name, known.histogram.weight(now), known.observed, *quantiles))
        return sorted(rows, key=lambda row: (-row.weight, row.tool))

    def share(self) -> None:
        """From now on what is observed is also kept for `take_unsent`."""
        self._unsent = {}

    def take_unsent(self) -> dict[Key, dict[int, float]]:
        """Gaps since the last call, as weights by bucket; whoever takes them passes them on, or gives them back."""
        taken, self._unsent = self._unsent or {}, {}
        return taken

    def give_back(self, unsent: Mapping[Key, Mapping[int, float]]) -> None:
        """They could not be passed on. Those of tools that were forgotten meanwhile are dropped."""
        if self._unsent is None:
            return
        for key, buckets in unsent.items():
            if key in self._tools:
                mine = self._unsent.setdefault(key, {})
                for bucket, weight in buckets.items():
                    mine[bucket] = mine.get(bucket, 0.0) + weight

    def names(self) -> Iterator[Key]:
        """(tenant, tool) of all that is known, most recently used first."""
        return reversed(tuple(self._tools))

    def replace(self, tenant: str, tool: str, shared: Mapping[int, float]) -> None:
        """What all gateways together know of a tool: weights by bucket, this process's own among them but for the unsent."""
        now = self._clock()
        known = self._get(tenant, tool)
        histogram = DecayedHistogram(self._config.half_life, now)
        histogram.merge(shared, now)
        if self._unsent is not None:
            histogram.merge(self._unsent.get((tenant, tool), {}), now)
        known.histogram = histogram

    def _predict(self, tenant: str, name: str, now: float) -> GapPrediction | None:
        known = self._tools.get((tenant, name))
        if known is not None:
            self._tools.move_to_end((tenant, name))
            weight, found = known.histogram.summary(now, _SHARES)
            if weight >= self._config.min_weight or name == NO_TOOL:
                return _prediction(weight, found, "tool")
        together = self._tools.get((tenant, ALL_TOOLS)) if name != NO_TOOL else None
        if together is None:
            return None
        return _prediction(*together.histogram.summary(now, _SHARES), "tenant")

    def _to_blame(self, tenant: str, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(names) == 1:
            return names
        unknown = tuple(name for name in names if (tenant, name) not in self._tools)
        return unknown or (max(names, key=lambda name: self._median(tenant, name)),)

    def _median(self, tenant: str, name: str) -> float:
        found = self._tools[tenant, name].histogram.quantiles((0.5,))
        return found[0] if found is not None else 0.0

    def _book(self, tenant: str, name: str, seconds: float) -> None:
        known = self._get(tenant, name)
        known.histogram.add(seconds, self._clock())
        known.observed += 1
        if self._unsent is not None:
            mine = self._unsent.setdefault((tenant, name), {})
            bucket = bucket_of(seconds)
            mine[bucket] = mine.get(bucket, 0.0) + 1.0

    def _get(self, tenant: str, name: str) -> _Tool:
        key = (tenant, name)
        known = self._tools.get(key)
        if known is None:
            if self._per_tenant[tenant] >= self._config.max_tools_per_tenant:
                self._drop(next(other for other in self._tools if other[0] == tenant))
            elif len(self._tools) >= self._config.max_tools:
                self._drop(next(iter(self._tools)))
            known = self._tools[key] = _Tool(DecayedHistogram(self._config.half_life, self._clock()))
            self._per_tenant[tenant] += 1
        self._tools.move_to_end(key)
        return known

    def _drop(self, key: Key) -> None:
        del self._tools[key]
        if self._unsent is not None:
            self._unsent.pop(key, None)
        self._per_tenant[key[0]] -= 1
        if not self._per_tenant[key[0]]:
            del self._per_tenant[key[0]]


def _prediction(weight: float, found: Sequence[float] | None, basis: str) -> GapPrediction | None:
    return GapPrediction(found[0], found[1], weight, basis) if found is not None else None


def _names(tools: Iterable[str]) -> tuple[str, ...]:
    """Each once, bounded in length and number."""
    if not tools:
        return _NONE
    names = tuple(dict.fromkeys(bounded_key(name) for name in tools if name))[:MAX_CALLS]
    return names or _NONE
