"""What became of guesses, by who guessed."""

from __future__ import annotations

from engine.speculation.drafts import GRAMMAR, Draft
from gateway.workers.protocol import DrafterStats


class _Counts:
    def __init__(self) -> None:
        self.drafts = self.drafted = self.accepted = 0
        self.per_position: list[int] = []

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.per_position += [0] * (drafted - len(self.per_position))
        for position in range(accepted):
            self.per_position[position] += 1

    def stats(self, name: str) -> DrafterStats:
        return DrafterStats(
            name=name,
            drafts_total=self.drafts,
            drafted_tokens_total=self.drafted,
            accepted_tokens_total=self.accepted,
            accepted_per_position_total=tuple(self.per_position),
        )


class Tally:
    """Counts since the start. Positions are as many as the longest guess had tokens."""

    def __init__(self) -> None:
        self._all = _Counts()
        self._by: dict[str, _Counts] = {}

    @property
    def drafted(self) -> int:
        """Tokens guessed."""
        return self._all.drafted

    @property
    def accepted(self) -> int:
        """Tokens of guesses that came true."""
        return self._all.accepted

    def verified(self, draft: Draft, accepted: int) -> None:
        """The first `accepted` tokens of a guess came true."""
        self._all.add(len(draft.tokens), accepted)
        if draft.forced:
            self._counts(GRAMMAR).add(draft.forced, min(accepted, draft.forced))
        if len(draft.tokens) > draft.forced:
            self._counts(draft.by).add(len(draft.tokens) - draft.forced, max(accepted - draft.forced, 0))

    def whole(self) -> DrafterStats | None:
        """Of whole guesses, whoever made their parts; None before the first."""
        return self._all.stats("all") if self._all.drafts else None

    def each(self) -> tuple[DrafterStats, ...]:
        """Of each source that has guessed, in the order of their names."""
        return tuple(counts.stats(name) for name, counts in sorted(self._by.items()))

    def _counts(self, name: str) -> _Counts:
        return self._by.setdefault(name, _Counts())
