"""From which rows of its logits a step chooses tokens, and for whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.request import Sequence
from engine.sampling.state import SamplingState
from engine.scheduler import ScheduledSequence
from engine.speculation.drafts import Draft


@dataclass(frozen=True, slots=True)
class Choosing:
    """A sequence that a token is chosen for. `rows` of the logits: behind its known tokens, and behind each guess."""

    sequence: Sequence
    rows: range
    draft: Draft | None = None

    @property
    def drafted(self) -> tuple[int, ...]:
        return () if self.draft is None else self.draft.tokens

    def states(self) -> list[SamplingState]:
        """The sampler's memory at each row."""
        state = self.sequence.sampling
        return [state, *(state.ahead(self.drafted[:count]) for count in range(1, len(self.rows)))]


def rows_of(scheduled: Iterable[ScheduledSequence]) -> list[Choosing]:
    """Which sequences tokens are chosen for, and from which rows of the logits. The first token of every choice comes from the
    prompt's last row."""
    wanted: list[Choosing] = []
    at = 0
    for item in scheduled:
        if not item.samples:
            continue
        rows = range(at, at + 1 + item.count - item.known)
        at = rows.stop
        if item.sequence.is_trunk:
            wanted.extend(Choosing(choice, rows) for choice in item.sequence.request.sequences)
        else:
            wanted.append(Choosing(item.sequence, rows, item.draft))
    return wanted
