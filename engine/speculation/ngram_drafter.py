"""Guesses from the sequence itself (engine.speculation.ngrams)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.speculation.drafts import Ask, Drafter
from engine.speculation.ngrams import History, continuation


class NGramDrafter(Drafter):
    """Costs nothing to speak of, so it is asked first."""

    name = "ngram"

    def draft(self, asks: SequenceOf[Ask], running: int) -> list[list[int]]:
        return [_draft(ask) for ask in asks]


def _draft(ask: Ask) -> list[int]:
    sequence = ask.sequence
    if sequence.history is None:
        sequence.history = History(sequence.request.prompt)
    known = sequence.history.tokens(sequence.request.prompt_tokens, sequence.output)
    if ask.after:
        # Those are only thought of: they must not stay in the history.
        known = History(known).tokens(len(known), list(ask.after))
    return continuation(known, ask.limit)
