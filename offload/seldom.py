"""Warnings of which thousands may be due at once."""

from __future__ import annotations

import logging
import time


class Seldom:
    """Says at most one warning in `seconds`, and with it how many it kept to itself."""

    def __init__(self, logger: logging.Logger, seconds: float = 60.0) -> None:
        self._logger = logger
        self._seconds = seconds
        self._said: float | None = None
        self._unsaid = 0

    def say(self, message: str, *values: object) -> None:
        """As `logging.Logger.warning`."""
        now = time.monotonic()
        if self._said is not None and now - self._said < self._seconds:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more like it before.)" if self._unsaid else ""
        self._said, self._unsaid = now, 0
        self._logger.warning(message + more, *values)
