"""What the pool tells others about its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.workers.protocol import WorkerInfo
from gateway.workers.tiers import OffloadView


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the pool sees it; `state` is starting, ready, down or mismatched, `detail` a sentence why.

    `queued_tokens`: of prompts sent there and not yet computed. `events_lag`: seconds since its KV events were last heard of.
    `event_trouble`: how often what went wrong with them (base.CountsTrouble).
    `draining`: nothing new goes there, what runs there is finished. `offload`: its tiers; None where it reports none, and while
    it is not ready.
    """

    name: str
    url: str
    state: str
    detail: str
    info: WorkerInfo | None
    in_flight: int
    queued_tokens: int
    indexed_blocks: int
    events_lag: float | None
    draining: bool = False
    event_trouble: Mapping[str, int] = field(default_factory=dict)
    offload: OffloadView | None = None
