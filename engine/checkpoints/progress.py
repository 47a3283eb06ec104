"""How far a pull is: one callback, so that the rooms below the command line draw nothing."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str, int, int | None], None]
"""Called with a stage's name, how much of it is done, and its total (None: not known). Units are bytes."""


def silent(stage: str, done: int, total: int | None) -> None:
    """A `Report` for callers that show nothing."""
