"""Proposes drafts for sequences that decode.

Where they come from: the text that the grammar forces, as far as its tokens are likely to be the model's (XGrammar's
jump-forward tokens), and after it what followed the last time the same tokens stood in the sequence.

How they are verified: the pass computes the logits behind every drafted token, and a token is sampled from each row with the
random number of its position, as if it stood alone. As long as what is sampled is what was drafted, the next row counts; the
first that differs is the sequence's next token, and the rest is thrown away. So a sequence gets the tokens that it would have
got without any drafts, greedy or not, and the chance that a draft is accepted is what rejection sampling gives a draft
without a distribution of its own: the model's probability of it (Leviathan et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from engine.request import Sequence
from engine.speculation.forced_text import ForcedText
from engine.speculation.lengths import DraftLength
from engine.speculation.ngrams import History, continuation


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, at least one, all of which the grammar allows."""

    tokens: tuple[int, ...]


class Drafter(Protocol):
    """Guesses what comes next; a draft model, for one."""

    def draft(self, sequence: Sequence, after: SequenceOf[int], limit: int) -> SequenceOf[int]:
        """At most `limit` tokens that may follow the sequence's known ones and those in `after`."""


class NGramDrafter:
    """From the sequence itself (engine.speculation.ngrams)."""

    def draft(self, sequence: Sequence, after: SequenceOf[int], limit: int) -> SequenceOf[int]:
        if sequence.history is None:
            sequence.history = History(sequence.request.prompt)
        known = sequence.history.tokens(sequence.request.prompt_tokens, sequence.output)
        if after:
            # Those are only thought of: they must not stay in the history.
            known = History(known).tokens(len(known), list(after))
        return continuation(known, limit)


class Speculator:
    """Decides who drafts how much. max_draft_tokens: of one sequence at once; 0: never. max_batch: running sequences beyond
    which nobody drafts, since the pass is then bound by computing and every drafted token takes its time."""

    def __init__(self, max_draft_tokens: int, max_batch: int, drafter: Drafter | None = None) -> None:
        self._longest = max_draft_tokens
        self._max_batch = max_batch
        self._drafter = drafter if drafter is not None else NGramDrafter()
        self._spelled = ForcedText()

    def propose(self, sequence: Sequence, running: int, room: int) -> Draft | None:
        """A draft for a sequence that decodes, of at most `room` tokens. `running`: how many run. The sequence and its grammar
        stay as they are."""
        if running > self._max_batch or sequence.is_trunk:
            return None
        # One token comes after the draft, whatever becomes of it, and the last one's KV is never needed.
        limit = min(self._longest, room, sequence.request.max_total - sequence.num_tokens - 1)
        if limit < 1:
            return None
        if sequence.draft_length is None:
            sequence.draft_length = DraftLength(self._longest)
        if sequence.matcher is None:
            limit = min(limit, sequence.draft_length.next())
            tokens = tuple(self._drafter.draft(sequence, (), limit)) if limit else ()
            return Draft(tokens) if tokens else None
        try:
            return self._within_grammar(sequence, limit)
        except Exception as error:  # noqa: BLE001 - fails this request alone, when its next token is chosen
            sequence.broken = error
            return None

    def _within_grammar(self, sequence: Sequence, limit: int) -> Draft | None:
        matcher, wanted = sequence.matcher, sequence.draft_length
        if matcher is None or wanted is None or matcher.is_terminated():
            return None
        forced = self._spelled.tokens(matcher)[:limit]
        guessed = min(limit - len(forced), wanted.next())
        tokens = [*forced, *(self._drafter.draft(sequence, forced, guessed) if guessed > 0 else ())]
        if not tokens:
            return None
        allowed = 0
        try:
            for token in tokens:
                if not matcher.accept(token):
                    break
                allowed += 1
                if matcher.is_terminated():
                    break
        finally:
            matcher.rollback(allowed)
        return Draft(tuple(tokens[:allowed])) if allowed else None
