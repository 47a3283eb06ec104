"""Counters and histograms for one thread, of which the metrics library makes its families when somebody scrapes.

A turn counts some thirty things. The library's own metrics take a lock for each, and know of processes that share files;
here counting is an addition. Count on one event loop; a scrape may come from another thread.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally:
    """What one counter has counted."""

    __slots__ = ("created", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.created = time.time()

    def inc(self, amount: float = 1.0) -> None:
        """`amount` more, never less than 0."""
        self.value += amount


class Spread:
    """What one histogram has seen. `bounds`: the upper bounds of its buckets, rising, the last of them infinite."""

    __slots__ = ("bounds", "counts", "created", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0
        self.created = time.time()

    def observe(self, amount: float) -> None:
        """A number, which may be infinite."""
        self.counts[bisect_left(self.bounds, amount)] += 1
        self.total += amount


ChildT = TypeVar("ChildT", Tally, Spread)


class _Family(Collector, Generic[ChildT]):
    """One child for each combination of label values. Those must be bounded: none is ever forgotten."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        """A family without labels has its only child from the beginning."""
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._children: dict[tuple[str, ...], ChildT] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> ChildT:
        """The child with these label values, in order."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)} of them")
            child = self._children[values] = self._new()
        return child

    def describe(self) -> Iterable[Metric]:
        """By this the registry finds names that are taken."""
        return (self._empty(),)

    def collect(self) -> Iterable[Metric]:
        family = self._empty()
        children = list(self._children.items())
        for values, child in children:
            self._show(family, values, child)
        # The library's text form makes a family of its own of these.
        for values, child in children:
            family.add_sample(self._name + "_created", dict(zip(self._labels, values, strict=True)), child.created)
        return (family,)

    @abstractmethod
    def _new(self) -> ChildT: ...

    @abstractmethod
    def _empty(self) -> Metric: ...

    @abstractmethod
    def _show(self, family: Metric, values: tuple[str, ...], child: ChildT) -> None: ...


class CounterFamily(_Family[Tally]):
    """Counters by label values."""

    def _new(self) -> Tally:
        return Tally()

    def _empty(self) -> Metric:
        return CounterMetricFamily(self._name, self._text, labels=self._labels)

    def _show(self, family: Metric, values: tuple[str, ...], child: Tally) -> None:
        family.add_sample(self._name + "_total", dict(zip(self._labels, values, strict=True)), child.value)


class HistogramFamily(_Family[Spread]):
    """Histograms by label values, all with the same buckets."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, *, buckets: Sequence[float]
    ) -> None:
        """`buckets`: upper bounds, rising."""
        self._bounds = (*buckets, math.inf)
        super().__init__(name, text, labels, registry)

    def _new(self) -> Spread:
        return Spread(self._bounds)

    def _empty(self) -> Metric:
        return HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def _show(self, family: Metric, values: tuple[str, ...], child: Spread) -> None:
        labels = dict(zip(self._labels, values, strict=True))
        upto = list(accumulate(child.counts))
        for bound, count in zip(self._bounds, upto, strict=True):
            family.add_sample(
                self._name + "_bucket", {**labels, "le": "+Inf" if bound == math.inf else repr(float(bound))}, count
            )
        family.add_sample(self._name + "_count", labels, upto[-1])
        family.add_sample(self._name + "_sum", labels, child.total)


class Level(Collector):
    """A gauge without labels."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self.value = 0.0
        registry.register(self)

    def inc(self) -> None:
        """One more."""
        self.value += 1.0

    def dec(self) -> None:
        """One less."""
        self.value -= 1.0

    def set(self, value: float) -> None:
        """It is so much now."""
        self.value = value

    def describe(self) -> Iterable[Metric]:
        return (GaugeMetricFamily(self._name, self._text),)

    def collect(self) -> Iterable[Metric]:
        return (GaugeMetricFamily(self._name, self._text, value=self.value),)
