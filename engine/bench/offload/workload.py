"""Sessions as the engine sees them: prompts of token ids that grow from turn to turn, with gaps between."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefix_cache.hashing import block_digests


@dataclass(frozen=True, slots=True)
class Session:
    """`prompts`: uint32 arrays, each the beginning of the next. `outputs`: tokens generated for each. `gaps`: seconds before
    each turn, the first one's from the beginning."""

    name: str
    prompts: tuple[npt.NDArray[np.uint32], ...]
    outputs: tuple[int, ...]
    gaps: tuple[float, ...]


History = tuple[str, Sequence[npt.NDArray[np.uint32]]]
"""A session's name and prompts, each the beginning of the next."""


def fitting(histories: Iterable[History], longest: int) -> list[History]:
    """Histories as far as their prompts have at most `longest` tokens, if that is two turns or more."""
    cut = ((name, [prompt for prompt in prompts if len(prompt) <= longest]) for name, prompts in histories)
    return [(name, prompts) for name, prompts in cut if len(prompts) > 1]


def sessions_of(
    histories: Sequence[History],
    *,
    count: int,
    turns: int,
    output: int,
    gap: float,
    seed: int,
    within: float | None = None,
) -> list[Session]:
    """`count` sessions from histories, again with another name in the first prompt's end when there are fewer. Gaps are drawn
    from an exponential distribution with the mean `gap`, and sessions begin within three such times, or `within` so many
    seconds."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        name, prompts = histories[number % len(histories)]
        again = number // len(histories)
        taken = [_changed(prompt, again, len(prompts[0]) - 32) for prompt in prompts[:turns]]
        begins = 3 * gap if within is None else within
        gaps = tuple(chance.uniform(0, begins) if turn == 0 else chance.expovariate(1 / gap) for turn in range(len(taken)))
        made.append(Session(f"{name}-{again}", tuple(taken), (output,) * len(taken), gaps))
    return made


def working_set(sessions: Sequence[Session], block_size: int) -> int:
    """Blocks that hold all of the sessions at once, each block counted once."""
    names: set[bytes] = set()
    partial = 0
    for session in sessions:
        names.update(block_digests(session.prompts[-1], b"\0" * 16, block_size))
        partial += 1 + session.outputs[-1] // block_size
    return len(names) + partial


def largest(sessions: Sequence[Session], block_size: int) -> int:
    """Blocks that the largest turn takes."""
    return max(
        -(-(len(prompt) + output) // block_size) + 1
        for session in sessions
        for prompt, output in zip(session.prompts, session.outputs, strict=True)
    )


def _changed(prompt: npt.NDArray[np.uint32], again: int, start: int) -> npt.NDArray[np.uint32]:
    """Another token at `start`, the same in every turn: no block from there on is that of another session."""
    if not again:
        return prompt
    changed = prompt.copy()
    changed[max(0, start)] = prompt[0] + again
    return changed
