"""Requests that another worker began: what of them is known is checked, and taken in as if it had been generated here.

A generation depends on prompt, parameters and what was generated; random numbers on (seed, choice, position). So a choice
that is brought to where it stood, token by token (grammar, penalties, stop strings, counts), goes on as it would have gone
there. Used by the real and by the simulated engine; imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.core import RequestRefused
from engine.sampling.stopping import StopDecision
from gateway.workers.protocol import GenerateRequest
from prefix_cache.hashing import unpack_tokens


def resumed_tokens(wire: GenerateRequest, vocab_size: int, *, greedy: bool) -> list[list[int]]:
    """For each choice the ids it generated elsewhere; empty where the request is no resumed one. Raises RequestRefused."""
    if not wire.resume:
        return []
    if len(wire.resume) != wire.sampling.n:
        message = f"resume has {len(wire.resume)} entries and n is {wire.sampling.n}; give one for each choice."
        raise RequestRefused("invalid_resume", message, "resume")
    if wire.sampling.seed is None and not greedy:
        message = "A sampled generation goes on elsewhere by its seed only; give the seed that it began with."
        raise RequestRefused("invalid_resume", message, "sampling.seed")
    choices = []
    for index, choice in enumerate(wire.resume):
        field = f"resume[{index}].packed_token_ids"
        try:
            ids = unpack_tokens(choice.packed_token_ids)
        except ValueError as error:
            raise RequestRefused("invalid_resume", f"{field} is cut off: {error}.", field) from error
        outside = np.flatnonzero(ids >= vocab_size)
        if len(outside):
            where = int(outside[0])
            message = f"Token {int(ids[where])} at index {where} is not in the vocabulary; ids are 0 to {vocab_size - 1}."
            raise RequestRefused("invalid_token", message, field)
        choices.append([] if choice.finished else ids.tolist())
    return choices


def replay(index: int, token_ids: Sequence[int], append: Callable[[int], StopDecision | None]) -> StopDecision | None:
    """Takes the tokens of choice `index` in, in order. Returns why the last one ended it, if it did.

    Raises RequestRefused where an earlier one should have, since the sender does not mean the same generation then.
    """
    decision = None
    for position, token_id in enumerate(token_ids):
        if decision is not None:
            raise RequestRefused(
                "invalid_resume",
                f"Choice {index} ended with its token {position - 1} ({decision.finish_reason}), and {len(token_ids)} are "
                "given; resume with the parameters that the generation began with.",
                f"resume[{index}].packed_token_ids",
            )
        decision = append(token_id)
    return decision
