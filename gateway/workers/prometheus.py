"""Samples out of Prometheus text, by name. The text is scanned, not parsed: workers are asked for it every second."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_LABELS = rb'(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?'


class Scanner:
    """Finds the samples of some names. Times and exemplars behind a value are not expected."""

    def __init__(self, names: Iterable[str]) -> None:
        alternatives = b"|".join(re.escape(name.encode()) for name in names)
        self._pattern = re.compile(b"^(" + alternatives + b")" + _LABELS + rb" ([-+0-9.eE]+)\s*$", re.MULTILINE)

    def scan(self, text: bytes) -> dict[str, list[float]]:
        """Name -> its finite values, one for each set of labels. Names that do not occur are absent."""
        found: dict[str, list[float]] = {}
        for name, raw in self._pattern.findall(text):
            try:
                value = float(raw)
            except ValueError:
                continue
            if math.isfinite(value):
                found.setdefault(name.decode(), []).append(value)
        return found
