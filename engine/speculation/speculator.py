"""Proposes drafts for sequences that decode.

Where they come from: the text that the grammar forces, as far as its tokens are likely to be the model's (XGrammar's
jump-forward tokens), and after it what the first drafter that has an idea guesses.

How they are verified: the pass computes the logits behind every drafted token, and a token is sampled from each row with the
random number of its position, as if it stood alone. As long as what is sampled is what was drafted, the next row counts; the
first that differs is the sequence's next token, and the rest is thrown away. So a sequence gets the tokens that it would have
got without any drafts, greedy or not, and the chance that a draft is accepted is what rejection sampling gives a draft
without a distribution of its own: the model's probability of it (Leviathan et al. 2023).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.request import Sequence
from engine.speculation.drafts import Ask, Draft, Drafter
from engine.speculation.forced_text import ForcedText
from engine.speculation.lengths import DraftLength
from engine.speculation.ngram_drafter import NGramDrafter
from engine.speculation.tally import Tally

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Draft:
    """One in the making: `limit` tokens at most."""

    sequence: Sequence
    limit: int
    forced: tuple[int, ...] = ()
    guessed: tuple[int, ...] = ()
    by: str = ""


class Speculator:
    """Decides who drafts how much. max_draft_tokens: of one sequence at once; 0: never. max_batch: running sequences beyond
    which nobody drafts, since the pass is then bound by computing and every drafted token takes its time. drafters: asked one
    after the other, until one has an idea; None: n-grams alone."""

    def __init__(self, max_draft_tokens: int, max_batch: int, drafters: SequenceOf[Drafter] | None = None) -> None:
        self.tally = Tally()
        self._longest = max_draft_tokens
        self._max_batch = max_batch
        self._drafters: list[Drafter] = [NGramDrafter()] if drafters is None else list(drafters)
        self._spelled = ForcedText()

    def propose(self, sequences: SequenceOf[Sequence], running: int, room: int) -> list[Draft | None]:
        """Drafts for sequences that decode, of at most `room` tokens together, in their order. `running`: how many run. The
        sequences and their grammars stay as they are."""
        proposed: list[Draft | None] = [None] * len(sequences)
        if running > self._max_batch or self._longest < 1:
            return proposed
        making: dict[int, _Draft] = {}
        for index, sequence in enumerate(sequences):
            # One token comes after the draft, whatever becomes of it, and the last one's KV is never needed.
            limit = min(self._longest, room, sequence.request.max_total - sequence.num_tokens - 1)
            if limit < 1 or sequence.is_trunk or sequence.broken is not None:
                continue
            forced = self._forced(sequence, limit)
            if forced is not None:
                making[index] = _Draft(sequence, limit, forced)
                room -= limit
        for drafter in tuple(self._drafters):
            without = [draft for draft in making.values() if not draft.guessed and len(draft.forced) < draft.limit]
            self._ask(drafter, without, running)
        for index, draft in making.items():
            proposed[index] = _allowed(draft)
        return proposed

    def verified(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        """The first `accepted` tokens of a draft were what the model chose."""
        self.tally.verified(draft, accepted)
        guessed = len(draft.tokens) - draft.forced
        length = sequence.draft_lengths.get(draft.by)
        if guessed and accepted >= draft.forced and length is not None:
            length.verified(guessed, accepted - draft.forced)

    def stepped(self, seconds: float, tokens: int, running: int) -> None:
        """A step that decoded `tokens` for `running` sequences, and did nothing else, took `seconds`, drafting included."""
        for drafter in self._drafters:
            drafter.stepped(seconds, tokens, running)

    def forget_idle(self) -> None:
        """Gives up what drafters keep for sequences that do not run any more."""
        for drafter in self._drafters:
            drafter.forget_idle()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the books of all drafters balance."""
        for drafter in self._drafters:
            drafter.check_integrity()

    def _forced(self, sequence: Sequence, limit: int) -> tuple[int, ...] | None:
        """What the grammar forces, spelled; None for a sequence that takes no draft."""
        if sequence.matcher is None:
            return ()
        try:
            return None if sequence.matcher.is_terminated() else self._spelled.tokens(sequence.matcher)[:limit]
        except Exception as error:  # noqa: BLE001 - fails this request alone, when its next token is chosen
            sequence.broken = error
            return None

    def _ask(self, drafter: Drafter, drafts: SequenceOf[_Draft], running: int) -> None:
        longest = self._longest if drafter.longest is None else min(drafter.longest, self._longest)
        asks, asked = [], []
        for draft in drafts:
            length = draft.sequence.draft_lengths.setdefault(drafter.name, DraftLength(longest))
            limit = min(draft.limit - len(draft.forced), length.next())
            if limit > 0:
                asks.append(Ask(draft.sequence, draft.forced, limit))
                asked.append(draft)
        if not asks:
            return
        try:
            guesses = drafter.draft(asks, running)
        except Exception:
            logger.exception("the drafter %s failed; generation goes on without it", drafter.name)
            self._drafters.remove(drafter)
            return
        for draft, ask, guess in zip(asked, asks, guesses, strict=True):
            if len(guess):
                draft.guessed, draft.by = tuple(guess[: ask.limit]), drafter.name


def _allowed(draft: _Draft) -> Draft | None:
    """As far as the grammar allows it."""
    tokens = (*draft.forced, *draft.guessed)
    matcher = draft.sequence.matcher
    if matcher is None or not tokens:
        return Draft(tokens, 0, draft.by) if tokens else None
    allowed = 0
    try:
        try:
            for token in tokens:
                if not matcher.accept(token):
                    break
                allowed += 1
                if matcher.is_terminated():
                    break
        finally:
            matcher.rollback(allowed)
    except Exception as error:  # noqa: BLE001 - as above
        draft.sequence.broken = error
        return None
    return Draft(tokens[:allowed], min(len(draft.forced), allowed), draft.by) if allowed else None
