"""What all workers together say of one of them: what is supposed of it until it surely differs."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.router.deviation import Crowd
from gateway.router.estimator import PrefillEstimator
from gateway.router.way import Way

_FORGET = 0.99  # many report, so its memory may be longer in reports and is yet shorter in time


@dataclass(frozen=True, slots=True)
class Peers:
    """One fit and one way, of what all of them report."""

    estimator: PrefillEstimator = field(default_factory=lambda: PrefillEstimator(_FORGET))
    way: Way = field(default_factory=Way)
    speeds: Crowd = field(default_factory=Crowd)
    ways: Crowd = field(default_factory=Crowd)
