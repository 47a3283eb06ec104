"""What sampling remembers of one choice: its parameters, its counter and the tokens that penalties count."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gateway.workers.protocol import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would decide as argmax does, or overflow."""


class TokenCounts:
    """Distinct token ids and how often each came, as arrays that grow by doubling: append is O(1), reading a view."""

    __slots__ = ("_counts", "_ids", "_size", "_slots")

    def __init__(self) -> None:
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)
        self._size = 0
        self._slots: dict[int, int] = {}

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._slots

    def add(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is not None:
            self._counts[slot] += 1
            return
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[self._size] = token_id
        self._counts[self._size] = 1
        self._slots[token_id] = self._size
        self._size += 1

    def copy(self) -> TokenCounts:
        """One that goes on by itself."""
        other = TokenCounts()
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other._size, other._slots = self._size, dict(self._slots)
        return other

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """int64 [D], in order of first appearance."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """float32 [D]."""
        return self._counts[: self._size]


class SamplingState:
    """The sampler's memory of one choice of one request.

    prompt_token_ids: uint32 [P]; not kept unless a repetition penalty needs it. seed: 64 bits, signed or unsigned.
    choice: 0 .. n-1. eos_token_ids: masked, with the stop ids, until `min_tokens` were generated (unless `ignore_eos`).

    Random numbers depend on (seed, choice, position, token id) alone, where the position is that of the new token in the
    whole sequence, prompt included. A generation that goes on elsewhere with prompt and generated tokens as its prompt
    therefore draws the same numbers.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: npt.NDArray[np.uint32],
        seed: int,
        choice: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.params = params
        self.seed = seed & (2**64 - 1)
        self.choice = choice
        self.prompt_tokens = len(prompt_token_ids)
        self.generated = 0
        self.greedy = params.temperature < GREEDY_BELOW
        self.counted = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.repetition = params.repetition_penalty != 1.0
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        self.end_ids = np.unique(np.asarray(ends, dtype=np.int64))
        self.bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=len(params.logit_bias))
        self.bias_values = np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(params.logit_bias))
        self.counts = TokenCounts()
        self._prompt_ids = np.unique(prompt_token_ids).astype(np.int64) if self.repetition else np.empty(0, dtype=np.int64)
        self._beyond_prompt = TokenCounts()

    def append(self, token_id: int) -> None:
        """The token that was chosen for `position`."""
        self.generated += 1
        if self.counted:
            self.counts.add(token_id)
        if self.repetition and token_id not in self._beyond_prompt:
            slot = int(np.searchsorted(self._prompt_ids, token_id))
            if slot == len(self._prompt_ids) or self._prompt_ids[slot] != token_id:
                self._beyond_prompt.add(token_id)

    def ahead(self, tokens: Sequence[int]) -> SamplingState:
        """As it would be after these tokens; itself stays where it is."""
        later = copy.copy(self)
        if self.counted:
            later.counts = self.counts.copy()
        if self.repetition:
            later._beyond_prompt = self._beyond_prompt.copy()
        for token_id in tokens:
            later.append(token_id)
        return later

    @property
    def position(self) -> int:
        """Index in the sequence, prompt included, of the token to be sampled next."""
        return self.prompt_tokens + self.generated

    @property
    def ends_masked(self) -> bool:
        """True while EOS and stop ids may not be chosen."""
        return self.generated < self.params.min_tokens and len(self.end_ids) > 0

    def seen_ids(self) -> npt.NDArray[np.int64]:
        """int64 [D], distinct: tokens of prompt and generation, for the repetition penalty."""
        return np.concatenate([self._prompt_ids, self._beyond_prompt.ids])
