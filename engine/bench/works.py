"""What is measured: prefill, decode, sequences from end to end, and decode beside a long prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.bench.roofline import Step, decode_steps, steps_of

Kind = Literal["prefill", "decode", "run"]


@dataclass(frozen=True, slots=True)
class Work:
    """requests: (prompt tokens, tokens to generate), all there from the beginning. For decode, prompts are computed before the
    clock starts, and `steps` steps are timed in every turn, in which the context grows."""

    name: str
    kind: Kind
    requests: tuple[tuple[int, int], ...]
    steps: int = 0

    @property
    def tokens(self) -> int:
        """That are counted: prompt tokens for prefill, generated ones for decode and for runs of short prompts, and both where
        a run's prompts are most of its work."""
        if self.kind == "decode":
            return len(self.requests) * self.steps
        prompts, generated = (sum(column) for column in zip(*self.requests, strict=True))
        if self.kind == "prefill":
            return prompts
        return generated if generated >= prompts else prompts + generated

    def room(self, prompt: int, tokens: int, repeats: int, budget: int) -> int:
        """Tokens that a request of (prompt, tokens) comes to at most over a round that warms up and `repeats` more. The first
        sequences of a decode make tokens while the prompts of the last are computed; peers that work ahead make some more."""
        if self.kind != "decode":
            return prompt + tokens
        waiting = sum(length // min(budget, 256) + 1 for length, _ in self.requests)
        return prompt + self.steps * (repeats + 2) + waiting + 16

    def plan(self, budget: int, turn: int = 0) -> list[Step]:
        """The engine's steps in turn number `turn`, at `budget` tokens a step."""
        if self.kind == "decode":
            context = max(prompt for prompt, _ in self.requests)
            # The first token comes from the prompt's last row: the first timed step writes the KV of that token.
            return decode_steps(len(self.requests), context + 1 + turn * self.steps, self.steps)
        return steps_of(self.requests, budget)


def standard_works(max_context: int, decode_steps_short: int = 32, decode_steps_long: int = 16) -> list[Work]:
    """The works of `turnkeep bench engine`. Lengths are cut to what a model of `max_context` tokens holds."""
    long = min(4000, max_context // 2)
    short = min(16, long)
    works = [Work(f"prefill {length}", "prefill", ((length, 1),)) for length in dict.fromkeys((min(512, long), long))]
    for context, steps in ((short, decode_steps_short), (long, decode_steps_long)):
        works += [
            Work(f"decode {batch} x {context}", "decode", ((context, 0),) * batch, min(steps, max(1, max_context // 32)))
            for batch in (1, 4, 16)
        ]
    generated = min(64, max_context // 4)
    works.append(Work(f"16 sequences x {generated}", "run", ((short, generated),) * 16))
    works.append(Work(f"mixed: 4 decoding, prefill {long}", "run", (*(((short, min(16, generated)),) * 4), (long, 1))))
    return works
