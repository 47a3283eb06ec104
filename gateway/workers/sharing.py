"""How much of the KV that requests were set aside for a worker really holds: what sessions begin with alike stands there once,
and few answers are as long as they may be. Measured by what workers report of their blocks."""

from __future__ import annotations

from gateway.workers.protocol import WorkerStats

_FADE = 0.7
_LEAST = 0.1
_ENOUGH_BLOCKS = 16


class Sharing:
    """`factor`: blocks held for each block that was set aside, 1 until something is known, and never above."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, set_aside: int, stats: WorkerStats) -> None:
        """A report, and what was set aside meanwhile for requests whose prompts were computed. What others have there counts as
        ours, so that sharing a worker makes nobody bold."""
        if set_aside < _ENOUGH_BLOCKS or stats.num_blocks <= 0:
            return
        held = stats.num_blocks - stats.free_blocks - stats.cached_blocks
        seen = min(max(held / set_aside, _LEAST), 1.0)
        # It takes a few reports to become bold, and one to become careful.
        self.factor = seen if seen > self.factor else _FADE * self.factor + (1 - _FADE) * seen
