"""Samples out of Prometheus text, by name. The text is searched, not parsed: workers are asked for it every second."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Scanner:
    """Finds the samples of some names. Times and exemplars behind a value are not expected."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple((name, b"\n" + name.encode()) for name in names)

    def scan(self, text: bytes) -> dict[str, list[float]]:
        """Name -> its finite values, one for each set of labels. Names that do not occur are absent."""
        found: dict[str, list[float]] = {}
        lines = b"\n" + text + b"\n"
        for name, needle in self._names:
            at = lines.find(needle)
            while at >= 0:
                behind = at + len(needle)
                end = lines.index(b"\n", behind)
                # Another name may begin like this one.
                if lines[behind : behind + 1] in (b" ", b"{"):
                    value = _number(lines[behind:end].rsplit(None, 1))
                    if value is not None:
                        found.setdefault(name, []).append(value)
                at = lines.find(needle, end)
        return found


def _number(parts: list[bytes]) -> float | None:
    try:
        value = float(parts[-1])
    except (ValueError, IndexError):
        return None
    return value if math.isfinite(value) else None
