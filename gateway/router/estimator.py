"""How long a worker takes until the first token of a prompt, learned from what it reports.

    seconds = fixed                               whatever is asked of it
            + token * new                         prompt tokens it must compute
            + pair * new * (context + new / 2)    and what each of them attends to
            + neighbour * decoding * steps        the sequences that generate there take part in each of the steps
            + host, disk, remote * tokens         hits that must be brought to the device first

The coefficients are a recursive least squares fit that forgets (gateway.router.least_squares), `FORGET` with each observation.
Errors count relative to the prediction, a request of a millisecond as much as one of a minute; beyond a few times what is usual
they are pulled in (Huber's weights). Coefficients are never negative.

The prior has the shape of one 80 GB GPU with an 8B model and the speed of this worker: its scale is the running geometric
mean of observed to expected, so one request is enough to tell a CPU from a GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gateway.router.least_squares import FadingMoments

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
# A token is never free: where noise hides what it costs, a prefix must still be worth something.
_LEAST = (0.0, 0.1, 0.0, 0.0, 0.1, 0.1, 0.1)
# In these the coefficients are of like size.
_TOKENS, _PAIRS, _NEIGHBOURS = 1e3, 1e8, 10.0
_UNITS = (1.0, _TOKENS, _PAIRS, _NEIGHBOURS, _TOKENS, _TOKENS, _TOKENS)


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

    def expected(self, seen: Observation) -> float:
        """Seconds that such a prompt takes."""
        fixed, token, pair, neighbour, host, disk, remote = self
        new, context, decoding, _, from_host, from_disk, from_afar, beside = seen
        seconds = fixed + token * (new + beside) + pair * new * (context + 0.5 * new)
        if decoding:
            seconds += neighbour * decoding * (1.0 + new / STEP_TOKENS)
        if from_host or from_disk or from_afar:
            seconds += host * from_host + disk * from_disk + remote * from_afar
        return seconds

    def mixed(self, other: Coefficients, factor: float, share: float) -> Coefficients:
        """`share` of these and the rest of the other's on a machine that takes `factor` times as long."""
        rest = (1.0 - share) * factor
        return Coefficients._make([share * a + rest * b for a, b in zip(self, other, strict=True)])


class Observation(NamedTuple):
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

    def row(self) -> Row:
        """What each coefficient is multiplied by, in units in which they are alike."""
        new, context, decoding, _, host, disk, remote, beside = self
        return (
            1.0,
            (new + beside) / _TOKENS,
            new * (context + 0.5 * new) / _PAIRS,
            decoding * (1.0 + new / STEP_TOKENS) / _NEIGHBOURS,
            host / _TOKENS,
            disk / _TOKENS,
            remote / _TOKENS,
        )


Row = tuple[float, float, float, float, float, float, float]


class PrefillEstimator:
    """The coefficients of one worker, or of several that are supposed to be alike. `forget`: what an observation counts after
    the next."""

    def __init__(self, forget: float = FORGET) -> None:
        self._moments = FadingMoments(len(_UNITS), forget)
        self._base = _in_units(Coefficients())
        self._fitted = self._base
        self._scale = 1.0
        self._seen = 0
        self._noise = 1.0
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
        new, context, decoding, seconds, _, _, _, beside = seen
        if not 0.0 <= seconds <= _MAX_SECONDS or new < 0 or context < 0 or decoding < 0 or beside < 0:
            return
        row = seen.row()
        self._seen = times = self._seen + 1
        self._rescale(_product(row, self._base), seconds)
        expected = max(_product(row, self._fitted), _FLOOR)
        error = abs(seconds - expected) / expected
        usual = _HUBER * max(self._noise, _NOISE)
        weight = (1.0 if error <= usual else usual / error) / (_NOISE * max(seconds, expected)) ** 2
        self._noise += max(1.0 / times, _SCALE_GAIN) * (min(error, 2.0 * usual) - self._noise)
        self._moments.add(row, seconds, weight)
        # Solving costs more than all the rest; once a few dozen observations stand behind them, four more move little.
        if times <= _SOLVED_AT_ONCE or not times % 4:
            self._solve()

    def _rescale(self, expected: float, seconds: float) -> None:
        shift = math.log(max(seconds, 1e-6) / max(expected * self._scale, 1e-9))
        if self._seen > 4:
            shift = max(-1.0, min(shift, 1.0))
        self._scale *= math.exp(shift * max(1 / self._seen, _SCALE_GAIN))
        self._scale = max(_MIN_SCALE, min(self._scale, _MAX_SCALE))

    def _solve(self) -> None:
        scale = self._scale
        prior = [scale * value for value in self._base]
        self._fitted = fitted = self._moments.solve(
            prior,
            [1.0 / (_PRIOR_SPREAD * value) ** 2 for value in prior],
            [least * value for least, value in zip(_LEAST, prior, strict=True)],
        )
        self.coefficients = Coefficients._make([value / unit for value, unit in zip(fitted, _UNITS, strict=True)])


def _in_units(coefficients: Coefficients) -> list[float]:
    return [value * unit for value, unit in zip(coefficients, _UNITS, strict=True)]


def _product(row: Row, fitted: list[float]) -> float:
    a, b, c, d, e, f, g = row
    p, q, r, s, t, u, v = fitted
    return a * p + b * q + c * r + d * s + e * t + f * u + g * v
