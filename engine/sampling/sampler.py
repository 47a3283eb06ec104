"""Skeleton of the sampler: signatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's choice. `error` is a sentence where the row could not be sampled (token_id is then -1).

    logprob, top: natural logarithms of the softmax of the model's own logits, as `SamplingParams.logprobs` asks for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


class Sampler:
    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)

    def sample(
        self, logits: torch.Tensor, states: Sequence[SamplingState], bitmask: torch.Tensor | None = None
    ) -> list[SampledToken]:
        """logits float32 [R, V]; bitmask int32 [R, ceil(V / 32)], bit set = allowed, or None."""
        return [SampledToken(token_id) for token_id in torch.argmax(logits, dim=-1).tolist()]
