"""A turn and the ledgers of its session to a continuation: the prompt's ids, and the ledger they make.

Two ways lead to the same prompt. The *tail* way renders only the new messages, behind a skeleton of the old ones, where
stability.py says that this is right. The *whole* way renders everything, and compares the text with the ledger span by span;
it is right for any template and any edit, and costs what rendering costs. Every `check_every`th turn that could go the
first way goes the second, to find out whether both agree; as long as they do, fewer and fewer of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.histories.continuing import Work
from gateway.histories.cutting import Cutter
from gateway.histories.matching import Match, TurnText, best_match
from gateway.histories.skeleton import STAND_IN
from gateway.histories.splicing import any_reasoning
from gateway.histories.stability import Stability, TurnKind
from gateway.models import ServedModel
from gateway.outlines.outline import Outlines
from gateway.rendering import tool_dict
from gateway.turn import Turn
from sessions.continuation import Continuation
from sessions.digests import DIGEST_BYTES, context_digest, message_digests
from sessions.ledger import Ledger

_RAREST_CHECK = 16


class HistoryBuilder:
    """Makes the prompts of one model. Safe to use from several threads."""

    def __init__(self, model: ServedModel, *, restore_reasoning: bool = True, check_every: int = 64) -> None:
        self._model = model
        self._restore = restore_reasoning
        self._check_every = check_every
        self._tail_turns = itertools.count(1)
        self._next_check = 1
        self._check_gap = check_every
        self.cutter = Cutter(model.tokenizer)
        self.stability = Stability(model.renderer)
        self.outlines = Outlines(model.renderer, STAND_IN)
        self._stability_wanted = self.cutter.refusal is None

    def describe(self, turn: Turn) -> TurnText:
        """What `turn` is compared by."""
        kwargs = context_digest(dict(turn.template_kwargs))
        tools = [tool_dict(tool) for tool in turn.tools]
        renderer = self._model.renderer
        volatile = renderer.volatile()
        context = context_digest(self._model.name, renderer.fingerprint, kwargs.hex(), tools, volatile)
        known = turn.message_digests
        digests = known + message_digests(turn.messages[len(known) // DIGEST_BYTES :])
        return TurnText(digests, context, kwargs, tuple(volatile))

    def match(
        self, text: TurnText, branches: Sequence[Ledger], root: bytes, messages: Sequence[Mapping[str, Any]]
    ) -> Match | None:
        """The branch that a turn goes on from: gateway.histories.matching."""
        return best_match(text, branches, root, messages)

    def is_quick(self, turn: Turn, text: TurnText, match: Match | None, inline_characters: int) -> bool:
        """Whether the prompt is made in so little time that everybody else may wait for it: the templates have been tried for
        turns like this one, and what must be rendered and tokenised is short."""
        if self._stability_wanted and not self.stability.is_known(bool(turn.tools), text.kwargs_name):
            return False
        start = 0
        if match is not None and match.continues(text):
            known = match.messages == text.count or self.goes_by_tail(turn, text, match)
            start = match.messages if known else 0
        total = 0 if start else 256 * len(turn.tools)
        for message in turn.messages[start:]:
            content = message.get("content")
            total += (len(content) if isinstance(content, str) else 0) + 1024 * len(message.get("tool_calls") or ()) + 16
        return total <= inline_characters

    def warm_up(self) -> None:
        """Tries the templates with their default variables."""
        if self._stability_wanted and self._model.renderer.has_template:
            self.outlines.warm_up()
            for tools in (False, True):
                for reasoning in (False, True):
                    self.stability.answers(tools=tools, reasoning=reasoning, kwargs={}, kwargs_name=context_digest({}))

    def build(
        self, turn: Turn, text: TurnText, match: Match | None, *, root: bytes, block_size: int, max_tokens: int
    ) -> Continuation:
        """The prompt of a turn. Raises TurnError when the template does not take it, PromptTooLongError, and ValueError for
        text that is no Unicode."""
        work = Work(self, turn, text, match, root, block_size, max_tokens)
        return work.continuation()

    def goes_by_tail(self, turn: Turn, text: TurnText, match: Match) -> bool:
        """Whether the messages that a turn has beyond its match, all of which it has, may be rendered without those before
        them."""
        if match.by_tail is None:
            match.by_tail = self._goes_by_tail(turn, text, match)
        return match.by_tail

    def _goes_by_tail(self, turn: Turn, text: TurnText, match: Match) -> bool:
        ledger, start = match.ledger, match.messages
        # What users have said for long is not looked through every turn.
        before = ledger.odd if ledger.odd is not None else self.stability.is_odd(turn.messages[:start])
        match.odd = before or self.stability.is_odd(turn.messages[start:])
        if match.odd:
            return False
        match.reasons = any_reasoning(turn.messages[start:])
        reasoning = match.reasons or ledger.reasoned or any(item.reasoning for item in ledger.pending)
        return self.stability.holds(
            TurnKind.of(turn.messages, start),
            tools=bool(turn.tools),
            reasoning=reasoning,
            kwargs=turn.template_kwargs,
            kwargs_name=text.kwargs_name,
        )

    @property
    def model(self) -> ServedModel:
        return self._model

    @property
    def restores_reasoning(self) -> bool:
        return self._restore

    def is_check(self) -> bool:
        """Whether this turn, which could be rendered in part, is rendered whole to see that both agree."""
        if not self._check_every:
            return False
        turn = next(self._tail_turns)
        if turn < self._next_check:
            return False
        self._next_check = turn + self._check_gap
        return True

    def agreed(self) -> None:
        """A check found nothing. The next is farther away: it costs as much as the whole history, and holds others up."""
        self._check_gap = min(2 * self._check_gap, _RAREST_CHECK * self._check_every)
