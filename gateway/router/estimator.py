"""How long a worker takes until the first token of a prompt, learned from what it reports.

    seconds = fixed                               whatever is asked of it
            + token * new                         prompt tokens it must compute
            + pair * new * (context + new / 2)    and what each of them attends to
            + neighbour * decoding * steps        the sequences that generate there take part in each of the steps
            + host, disk, remote * tokens         hits that must be brought to the device first

The coefficients are a weighted recursive least squares fit in information form (Haykin, Adaptive Filter Theory, ch. 10): the
normal equations decay by `FORGET` with each observation, and a prior of fixed strength is added when they are solved. So what
is never observed (a tier the worker has not) stays at its prior instead of drifting, and nothing winds up however long the
same request repeats. Errors count relative to the prediction, a request of a millisecond as much as one of a minute; beyond a
few times what is usual they are pulled in (Huber's weights). Coefficients are never negative.

The prior has the shape of one 80 GB GPU with an 8B model and the speed of this worker: its scale is the running geometric
mean of observed to expected, so one request is enough to tell a CPU from a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FORGET = 0.97
STEP_TOKENS = 8192
"""Prompt tokens that a worker computes in one step; only the share of neighbours in long prompts hangs on it."""

_MAX_SECONDS = 3600.0
_PRIOR_SPREAD = 1.0  # of a coefficient, as a share of it
_NOISE = 0.2  # of an observation, as a share of it
_FLOOR = 1e-3  # seconds below which errors do not count relatively any more
_HUBER = 2.0
_SCALE_GAIN = 0.05
_SOLVED_AT_ONCE = 32
_MIN_SCALE, _MAX_SCALE = 1e-4, 1e5
Vector = npt.NDArray[np.float64]
# A token is never free: where noise hides what it costs, a prefix must still be worth something.
_LEAST: Vector = np.array([0.0, 0.1, 0.0, 0.0, 0.1, 0.1, 0.1])
_UNITS: Vector = np.array([1.0, 1e3, 1e8, 10.0, 1e3, 1e3, 1e3])


class Coefficients(NamedTuple):
    """Seconds per request, token, pair of tokens, neighbour and step, and token brought from a lower tier."""

    fixed: float = 0.01
    token: float = 4e-5
    pair: float = 1.3e-9
    neighbour: float = 4e-5
    host: float = 5e-6
    disk: float = 4e-5
    remote: float = 8e-5

    def work(self, new: float, context: float) -> float:
        """Seconds that `new` tokens behind `context` others add to the steps that compute them."""
        return new * (self.token + self.pair * (context + 0.5 * new))

    def overhead(self, decoding: float, new: float) -> float:
        """Seconds that those steps take in any case, with `decoding` neighbours in them."""
        return self.fixed + self.neighbour * decoding * (1.0 + new / STEP_TOKENS)

    def scaled(self, factor: float) -> Coefficients:
        """Of a machine that takes `factor` times as long."""
        return Coefficients(*(factor * value for value in self))

    def expected(self, seen: Observation) -> float:
        """Seconds that such a prompt takes."""
        lifted = self.host * seen.host + self.disk * seen.disk + self.remote * seen.remote
        return self.work(seen.new, seen.context) + self.token * seen.beside + self.overhead(seen.decoding, seen.new) + lifted

    def mixed(self, other: Coefficients, share: float) -> Coefficients:
        """`share` of these and the rest of the other's."""
        return Coefficients(*(share * a + (1.0 - share) * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Observation:
    """One prompt that was computed: `seconds` from leaving the queue to the first token. `beside`: tokens of other prompts that
    were computed in that time."""

    new: int
    context: int
    decoding: int
    seconds: float
    host: int = 0
    disk: int = 0
    remote: int = 0
    beside: int = 0

    def row(self) -> Vector:
        pairs = self.new * (self.context + self.new / 2)
        neighbours = self.decoding * (1 + self.new / STEP_TOKENS)
        values = (1.0, self.new + self.beside, pairs, neighbours, self.host, self.disk, self.remote)
        return np.array(values, dtype=np.float64) / _UNITS


class PrefillEstimator:
    """The coefficients of one worker, or of several that are supposed to be alike. `forget`: what an observation counts after
    the next."""

    def __init__(self, forget: float = FORGET) -> None:
        self._forget = forget
        self._base = np.array(Coefficients()) * _UNITS
        self._scale = 1.0
        self._seen = 0
        self._noise = 1.0
        size = len(_UNITS)
        self._moments = np.zeros((size, size))
        self._targets = np.zeros(size)
        self.coefficients = Coefficients()

    @property
    def observations(self) -> int:
        """How many there were, outliers among them."""
        return self._seen

    @property
    def error(self) -> float:
        """Running mean of |observed - estimated| / estimated; 1 before anything was observed."""
        return self._noise

    def observe(self, seen: Observation) -> None:
        """Learns from one prompt. What cannot have been (negative, endless, not a number) is ignored."""
        seconds = seen.seconds
        if not 0.0 <= seconds <= _MAX_SECONDS or min(seen.new, seen.context, seen.decoding, seen.beside) < 0:
            return
        row = seen.row()
        self._seen += 1
        self._rescale(float(row @ self._base), seconds)
        expected = max(float(row @ (np.array(self.coefficients) * _UNITS)), _FLOOR)
        error = abs(seconds - expected) / expected
        usual = _HUBER * max(self._noise, _NOISE)
        weight = (1.0 if error <= usual else usual / error) / (_NOISE * max(seconds, expected, _FLOOR)) ** 2
        gain = max(1 / self._seen, _SCALE_GAIN)
        self._noise += gain * (min(error, 2 * usual) - self._noise)
        self._moments = self._forget * self._moments + weight * np.outer(row, row)
        self._targets = self._forget * self._targets + weight * seconds * row
        # Solving costs more than all the rest; once a few dozen observations stand behind them, four more move little.
        if self._seen <= _SOLVED_AT_ONCE or self._seen % 4 == 0:
            self.coefficients = Coefficients(*(float(value) for value in self._solve() / _UNITS))

    def _rescale(self, expected: float, seconds: float) -> None:
        shift = math.log(max(seconds, 1e-6) / max(expected * self._scale, 1e-9))
        if self._seen > 4:
            shift = max(-1.0, min(shift, 1.0))
        self._scale *= math.exp(shift * max(1 / self._seen, _SCALE_GAIN))
        self._scale = max(_MIN_SCALE, min(self._scale, _MAX_SCALE))

    def _solve(self) -> Vector:
        """The least squares solution above `_LEAST` of the prior: what would lie below is held there, one after another."""
        prior = self._base * self._scale
        least = _LEAST * prior
        strength = 1.0 / (_PRIOR_SPREAD * prior) ** 2
        moments = self._moments + np.diag(strength)
        targets = self._targets + strength * prior - moments @ least
        free = np.ones(len(prior), dtype=bool)
        above = np.zeros(len(prior))
        while free.any():
            above[:] = 0.0
            above[free] = np.linalg.solve(moments[np.ix_(free, free)], targets[free])
            lowest = int(above.argmin())
            if above[lowest] >= 0:
                break
            free[lowest] = False
        return least + np.maximum(above, 0.0)
