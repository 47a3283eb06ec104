"""How the reasoning at the beginning of an answer is marked, and how long it may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Thinking:
    """Of one turn. `state`: what the prompt's end says. `open`: the answer begins within the region. `possible`: it may begin
    with one. `budget`: tokens after which the region must end (None: any number); 0: it may hold nothing.

    `begin` and `end`: the texts around the region. `after`: what the template writes between the region and the answer.
    """

    state: Literal["open", "possible"]
    begin: str = "<think>"
    end: str = "</think>"
    after: str = "\n\n"
    budget: int | None = None
