"""Choosing on any torch device: whole batches, no synchronisation with the host.

What is computed, per row, from its adjusted logits l (see `sampler`), with z = (l - max l) / temperature:

1. min_p: tokens with z < log(min_p) go, that is those less likely than min_p times the most likely one.
2. top_k: tokens less likely than the k-th most likely one go.
3. top_p: of what is left, the most likely tokens are kept until they have `top_p` of the probability that is left; a token
   stays when those more likely than it have less than that.
   This is vLLM's order. Each step keeps the tokens at or above some value of z, so equal logits stay or go together and
   nothing depends on how a sort orders them.
4. Gumbel-max: the token with the largest z - log(E) is chosen, E an exponential variate of its own (`philox`). That samples
   from the softmax of z over the tokens kept. Rounding differences of the logits (other batch, chunking or kernel) change
   the outcome only where the two best scores nearly tie. Walking along cumulative probabilities instead lets them move the
   ends of all intervals: with noise of 1e-5 on 49152 Zipf-like logits that changed 93 of 4000 tokens, this none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.philox import GAMMA, LARGEST_UNIFORM, MIX_MULTIPLIERS, MIX_SHIFTS
from engine.sampling.state import SamplingState


def choose(
    rows: torch.Tensor, states: Sequence[SamplingState], keys: npt.NDArray[np.uint64], largest: torch.Tensor
) -> torch.Tensor:
    """int64 [N], the tokens of N rows; for rows of nothing but -inf or with NaN, any token.

    rows: float32 [N, V], adjusted logits; largest: float32 [N], their maxima; keys: the rows' stream keys.
    """
    device, vocab_size = rows.device, rows.shape[1]
    params = [state.params for state in states]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32).to(device, non_blocking=True)
    scores = (rows - largest.unsqueeze(1)) / temperature.unsqueeze(1)
    if any(p.min_p > 0.0 or p.top_p < 1.0 or 0 < p.top_k < vocab_size for p in params):
        threshold = _thresholds(
            scores,
            torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]).to(device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64).to(device),
            torch.tensor([p.min_p for p in params], dtype=torch.float64).to(device),
        )
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    signed = torch.from_numpy(keys.view(np.int64)).to(device)
    return torch.argmax(scores - log_exponential(signed, vocab_size), dim=-1)


def _thresholds(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """float32 [N, 1]: the least score kept of each row. top_k: int64 [N]; top_p, min_p: float64 [N]; all of them may be off."""
    ordered = torch.sort(scores, dim=-1, descending=True).values
    threshold = torch.log(min_p).to(torch.float32).unsqueeze(1)
    threshold = torch.maximum(threshold, ordered.gather(1, (top_k - 1).unsqueeze(1)))
    weights = torch.exp(ordered.to(torch.float64)).masked_fill(ordered < threshold, 0.0)
    cumulative = torch.cumsum(weights, dim=-1)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    kept = (before < top_p.unsqueeze(1) * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    nucleus = ordered.gather(1, (kept - 1).clamp_(min=0))
    return torch.where(top_p.unsqueeze(1) < 1.0, torch.maximum(threshold, nucleus), threshold)


def _signed(word: int) -> int:
    """A 64-bit word as torch has it: products of int64 wrap around to the same bits."""
    return word - 2**64 if word >= 2**63 else word


def _shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right of int64."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def log_exponential(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float32 [N, V]: the logarithm of an exponential variate for each token of each row. keys: int64 [N]."""
    pairs = torch.arange(1, (vocab_size + 1) // 2 + 1, device=keys.device) * _signed(GAMMA)
    words = keys.unsqueeze(1) + pairs
    words = (words ^ _shift(words, MIX_SHIFTS[0])) * _signed(MIX_MULTIPLIERS[0])
    words = (words ^ _shift(words, MIX_SHIFTS[1])) * _signed(MIX_MULTIPLIERS[1])
    words = words ^ _shift(words, MIX_SHIFTS[2])
    halves = torch.stack([words & 0xFFFFFFFF, _shift(words, 32)], dim=-1).flatten(1)[:, :vocab_size]
    uniform = ((halves.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return torch.log(-torch.log1p(-uniform))
