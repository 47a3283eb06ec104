"""Turns that wait for one model's workers, in the order in which they may go. Pure: no clock, no waiting.

Classes share by weight, so that a lower one is slower and never stands still. Within a class turns of sessions in progress go
before first turns of new ones. Within each of the two, tenants share evenly by tokens of work: start-time fair queueing (Goyal,
Vin, Cheng 1996) with virtual times kept for flows instead of tags kept for turns, so that a turn which leaves costs nothing.
When there is no room the tenant that has most of it loses its newest (longest queue drop: Suter, Lakshman, Stiliadis, Choudhury
1998), first turns of new sessions before any other: whoever floods the queue pushes out their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gateway.access.entries import PRIORITY_CLASSES, PriorityClass

_MAX_IDLE_FLOWS = 4096


@dataclass(eq=False, slots=True)
class Waiting:
    """A turn that waits. `tokens`: of its prompts. `cost`: tokens of work, of which its tenant is charged a share.
    `continuing`: of a session in progress."""

    tenant: str
    priority: PriorityClass
    continuing: bool
    tokens: int
    cost: float


T = TypeVar("T", bound=Waiting)


@dataclass(eq=False, slots=True)
class _Flow(Generic[T]):
    """One tenant in one lane. `time`: virtual, what it was served."""

    time: float = 0.0
    turns: deque[T] = field(default_factory=deque)


class _Lane(Generic[T]):
    """Turns of one class and kind."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        self._active: dict[str, _Flow[T]] = {}
        self._time = 0.0
        self.size = 0
        self.cost = 0.0

    def __iter__(self) -> Iterator[T]:
        for flow in self._active.values():
            yield from flow.turns

    @property
    def tenants(self) -> dict[str, int]:
        """How many turns wait of which tenant."""
        return {tenant: len(flow.turns) for tenant, flow in self._active.items()}

    def push(self, turn: T) -> None:
        flow = self._flows.get(turn.tenant)
        if flow is None:
            self._forget_some()
            flow = self._flows[turn.tenant] = _Flow()
        if not flow.turns:
            # Who was away has saved nothing.
            flow.time = max(flow.time, self._time)
            self._active[turn.tenant] = flow
        flow.turns.append(turn)
        self.size += 1
        self.cost += turn.cost

    def head(self) -> T | None:
        flow = min(self._active.values(), key=lambda flow: flow.time, default=None)
        return flow.turns[0] if flow is not None else None

    def charge(self, turn: T) -> None:
        flow = self._active[turn.tenant]
        self._time = max(self._time, flow.time)
        flow.time += turn.cost

    def remove(self, turn: T) -> None:
        flow = self._active[turn.tenant]
        flow.turns.remove(turn)
        if not flow.turns:
            del self._active[turn.tenant]
        self.size -= 1
        self.cost = self.cost - turn.cost if self.size else 0.0

    def ahead_of(self, tenant: str) -> float:
        """What goes before a new turn of a tenant: its own turns, and of every other tenant as much, and one turn more."""
        own = sum(turn.cost for turn in self._active[tenant].turns) if tenant in self._active else 0.0
        total = own
        for other, flow in self._active.items():
            if other != tenant:
                total += min(sum(turn.cost for turn in flow.turns), own + flow.turns[0].cost)
        return total

    def newest(self, tenant: str) -> T:
        return self._active[tenant].turns[-1]

    def _forget_some(self) -> None:
        """Flows that owe nothing are as good as new."""
        if len(self._flows) < _MAX_IDLE_FLOWS + len(self._active):
            return
        idle = [(flow.time, tenant) for tenant, flow in self._flows.items() if not flow.turns]
        for _, tenant in sorted(idle)[: len(idle) // 2 + 1]:
            del self._flows[tenant]


class _Class(Generic[T]):
    """Both lanes of one class, and its own virtual time."""

    def __init__(self) -> None:
        self.continuing: _Lane[T] = _Lane()
        self.births: _Lane[T] = _Lane()
        self.time = 0.0

    @property
    def size(self) -> int:
        return self.continuing.size + self.births.size

    def lane(self, turn: T) -> _Lane[T]:
        return self.continuing if turn.continuing else self.births


class FairQueue(Generic[T]):
    """At most `size` turns of each class, and `max_tokens` of prompts in all. Sessions in progress may take the room of other
    classes beyond that: none of their turns is dropped while a first turn of any class waits."""

    def __init__(self, size: int, max_tokens: int, weight: Callable[[PriorityClass], float]) -> None:
        self._size = size
        self._max_tokens = max_tokens
        self._weight = weight
        self._classes: dict[PriorityClass, _Class[T]] = {name: _Class() for name in PRIORITY_CLASSES}
        self._time = 0.0
        self._members: set[T] = set()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, turn: T) -> bool:
        return turn in self._members

    def depth(self, priority: PriorityClass) -> int:
        """How many turns of a class wait."""
        return self._classes[priority].size

    def tenants(self, priority: PriorityClass) -> dict[str, int]:
        """How many turns of a class wait, by tenant."""
        both = self._classes[priority]
        counts = both.continuing.tenants
        for tenant, count in both.births.tenants.items():
            counts[tenant] = counts.get(tenant, 0) + count
        return counts

    def push(self, turn: T) -> list[T]:
        """Adds a turn, and gives those that have to go for it: it may be among them."""
        both = self._classes[turn.priority]
        if not both.size:
            both.time = max(both.time, self._time)
        both.lane(turn).push(turn)
        self._members.add(turn)
        self.tokens += turn.tokens
        dropped = []
        while both.size > self._size and both.births.size:
            dropped.append(self._victim([turn.priority], turn))
            self.remove(dropped[-1])
        most = self._size * len(self._classes)
        while len(self._members) > most or (self.tokens > self._max_tokens and len(self._members) > 1):
            dropped.append(self._victim(list(reversed(PRIORITY_CLASSES)), turn))
            self.remove(dropped[-1])
        return dropped

    def head(self) -> T | None:
        """The turn that goes next. The same until something is added, taken or removed."""
        waiting = [both for both in self._classes.values() if both.size]
        if not waiting:
            return None
        # Of equals the more urgent: classes are in that order.
        both = min(waiting, key=lambda both: both.time)
        return both.continuing.head() or both.births.head()

    def take(self, turn: T) -> None:
        """Removes the turn that goes next and charges its tenant and its class for it."""
        both = self._classes[turn.priority]
        self._time = max(self._time, both.time)
        both.time += turn.cost / self._weight(turn.priority)
        both.lane(turn).charge(turn)
        self.remove(turn)

    def remove(self, turn: T) -> None:
        """Removes a turn that does not go; one that is not here is ignored."""
        if turn not in self._members:
            return
        self._members.remove(turn)
        self.tokens -= turn.tokens
        self._classes[turn.priority].lane(turn).remove(turn)

    def ahead_of(self, tenant: str, priority: PriorityClass, *, continuing: bool) -> float:
        """Tokens of work that go before a turn that would come now, by and large."""
        total = 0.0
        for name, both in self._classes.items():
            if name == priority:
                total += (both.continuing if continuing else both.births).ahead_of(tenant)
                if not continuing:
                    total += both.continuing.cost
            elif both.size:
                # While both wait, the other class takes its share of every token of this one.
                total += min(
                    both.continuing.cost + both.births.cost,
                    (self._classes[priority].continuing.cost + self._classes[priority].births.cost)
                    * self._weight(name)
                    / self._weight(priority),
                )
        return total

    def _victim(self, classes: list[PriorityClass], arriving: T) -> T:
        """The first of these classes that has births loses one; without any, the first that has turns does."""
        for births in (True, False):
            for name in classes:
                both = self._classes[name]
                lane = both.births if births else both.continuing
                if lane.size:
                    all_of = self.tenants(name)
                    held = {tenant: (count, all_of[tenant]) for tenant, count in lane.tenants.items()}
                    most = max(held.values())
                    if arriving in self._members and lane is both.lane(arriving) and held.get(arriving.tenant) == most:
                        return arriving
                    return lane.newest(next(tenant for tenant, count in held.items() if count == most))
        return arriving
