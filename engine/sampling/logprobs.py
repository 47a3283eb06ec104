"""Log-probabilities that are reported with tokens: the natural logarithm of the softmax of the model's own logits.

They are taken before grammar, bias, penalties and temperature (vLLM's `raw_logprobs`), so they tell what the model thought,
and stay finite for a token that a grammar forced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

LEAST = -9999.0
"""Stands for anything less likely, -inf among them, which JSON cannot hold; OpenAI's API has the same value."""


def report(
    logits: torch.Tensor, token_ids: torch.Tensor, tops: Sequence[int]
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For each row the chosen token's log-probability and those of the `tops[row]` most likely tokens, most likely first;
    equally likely ones in order of their ids.

    logits: float32 [N, V]; token_ids: int64 [N].
    """
    logprobs = torch.log_softmax(logits, dim=-1).clamp_(min=LEAST)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).tolist()
    most = min(max(tops), logits.shape[1])
    if most == 0:
        return [(logprob, ()) for logprob in chosen]
    top_ids = most_likely(logits, most)
    ids, values = top_ids.tolist(), logprobs.gather(1, top_ids).tolist()
    return [
        (logprob, tuple(zip(ids[row][:top], values[row][:top], strict=True)))
        for row, (logprob, top) in enumerate(zip(chosen, tops, strict=True))
    ]


def most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [N, count]: ids in descending order of logits, equal ones ascending.

    A plain topk leaves the order of equal logits (common with bfloat16 weights) to chance and batch size.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(np.stack([_by_selection(row, count) for row in logits.numpy()]))
    return by_integer_keys(logits, count)


def _by_selection(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """int64 [count], for one row: only tokens at or above the last value reported are sorted."""
    rank = len(row) - count
    ids = np.flatnonzero(row >= np.partition(row, rank)[rank])
    order = np.argsort(-row[ids], kind="stable")
    return ids[order[:count]]


def by_integer_keys(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [N, count], on any device, by a topk of keys without equals: the float's bits, made to order as integers do,
    above the complement of the id. -0 counts as 0."""
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    complement = 0xFFFFFFFF - torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) | complement
    return 0xFFFFFFFF - (torch.topk(keys, count, dim=-1).values & 0xFFFFFFFF)
