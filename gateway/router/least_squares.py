"""A weighted recursive least squares fit in information form (Haykin, Adaptive Filter Theory, ch. 10), of a few coefficients.

The normal equations fade with each observation, and a prior of fixed strength is added when they are solved: what is never
observed stays at its prior instead of drifting, and nothing winds up however long the same observation repeats.

In plain Python on purpose: for half a dozen coefficients, of which most observations touch three, an array library takes
several times as long to be called as the arithmetic takes.
"""

from __future__ import annotations

from collections.abc import Sequence

_RENORMALISED_AT = 1e9


class FadingMoments:
    """The normal equations of `size` coefficients. `fade`: what an observation counts after the next."""

    __slots__ = ("_growth", "_moments", "_scale", "_size", "_targets")

    def __init__(self, size: int, fade: float) -> None:
        self._size = size
        self._growth = 1.0 / fade
        # Instead of letting everything that was seen fade, what comes counts more; `_scale` says how much by now.
        self._scale = 1.0
        self._moments = [[0.0] * size for _ in range(size)]  # the lower triangle
        self._targets = [0.0] * size

    def add(self, row: Sequence[float], target: float, weight: float) -> None:
        """An observation: row @ coefficients = target, as certain as its weight."""
        self._scale = scale = self._scale * self._growth
        weight *= scale
        present = [(number, value) for number, value in enumerate(row) if value]
        for number, value in present:
            weighted = weight * value
            self._targets[number] += weighted * target
            moments = self._moments[number]
            for other, theirs in present:
                if other > number:
                    break
                moments[other] += weighted * theirs
        if scale > _RENORMALISED_AT:
            self._renormalise()

    def solve(self, prior: Sequence[float], strength: Sequence[float], least: Sequence[float]) -> list[float]:
        """The coefficients above `least` that fit best what was observed and the prior, which counts with `strength`: what
        would lie below is held there, one after another."""
        found = list(prior)
        free = [number for number in range(self._size) if self._moments[number][number] > 0.0]
        if not free:
            return found
        for number in free:
            found[number] = least[number]
        # Of what lies above `least`; the coefficients that were never observed have nothing to do with the others.
        fade, observed = 1.0 / self._scale, tuple(free)
        moments: dict[int, dict[int, float]] = {number: {} for number in free}
        for number in free:
            row = self._moments[number]
            for other in free:
                if other > number:
                    break
                moments[number][other] = moments[other][number] = row[other] * fade
            moments[number][number] += strength[number]
        targets = {
            number: self._targets[number] * fade
            + strength[number] * prior[number]
            - sum([moments[number][other] * least[other] for other in observed])
            for number in free
        }
        while free:
            above = _solved([[moments[row][column] for column in free] + [targets[row]] for row in free])
            lowest = min(above)
            if lowest >= 0.0:
                for number, value in zip(free, above, strict=True):
                    found[number] = least[number] + value
                break
            del free[above.index(lowest)]
        return found

    def _renormalise(self) -> None:
        fade, self._scale = 1.0 / self._scale, 1.0
        self._moments = [[value * fade for value in row] for row in self._moments]
        self._targets = [value * fade for value in self._targets]


def _solved(rows: list[list[float]]) -> list[float]:
    """The solution of a system whose matrix is symmetric and positive definite, so that it needs no pivoting; each row ends
    with its right side."""
    size = len(rows)
    for at in range(size):
        pivot = rows[at]
        for below in range(at + 1, size):
            row = rows[below]
            factor = row[at] / pivot[at]
            if factor:
                for column in range(at + 1, size + 1):
                    row[column] -= factor * pivot[column]
    solution = [0.0] * size
    for at in range(size - 1, -1, -1):
        row = rows[at]
        value = row[size]
        for column in range(at + 1, size):
            value -= row[column] * solution[column]
        solution[at] = value / row[at]
    return solution
