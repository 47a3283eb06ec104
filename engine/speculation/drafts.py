"""What is guessed, and who guesses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.request import Sequence

GRAMMAR = "grammar"
"""The source of text that a grammar forces, in the tokens that the model is likely to write it in."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, at least one, all of which the grammar allows. The first `forced` of them spell what it
    forces; the others are a guess of the drafter `by`."""

    tokens: tuple[int, ...]
    forced: int = 0
    by: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """At most `limit` tokens are wanted, at least one, behind the known ones of a sequence and those in `after`."""

    sequence: Sequence
    after: tuple[int, ...]
    limit: int


class Drafter(ABC):
    """Guesses what comes next. Its guesses change how many passes a generation takes, and never its tokens. Belongs to the
    engine thread."""

    name: str
    longest: int | None = None
    """Tokens that it guesses at once, at most; None: as many as may be guessed."""

    @abstractmethod
    def draft(self, asks: SequenceOf[Ask], running: int) -> SequenceOf[SequenceOf[int]]:
        """For each, in their order, as many tokens as it has an idea of. `running`: how many sequences run. They stay as they
        are."""

    def forget_idle(self) -> None:  # noqa: B027 - most keep nothing
        """Gives up what is kept for sequences that do not run any more."""

    def stepped(self, seconds: float, tokens: int, running: int) -> None:  # noqa: B027 - most cost nothing
        """The step that decoded `tokens` for `running` sequences, guesses included, took `seconds`."""

    def check_integrity(self) -> None:  # noqa: B027 - most have no books
        """Raises IntegrityError unless its books balance."""
