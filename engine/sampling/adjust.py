"""What changes logits before a token is chosen: bias, penalties, forbidden tokens. Sparse, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.state import SamplingState

Indices = npt.NDArray[np.int64]


class _Places:
    """Some tokens of some rows: int64 [N] indices into the flattened logits, and which row each lies in."""

    def __init__(self, parts: Iterable[tuple[int, Indices]], vocab_size: int, device: torch.device) -> None:
        rows = list(parts)
        self._counts = [len(ids) for _, ids in rows]
        offsets = np.repeat(np.asarray([row * vocab_size for row, _ in rows], dtype=np.int64), self._counts)
        ids = np.concatenate([ids for _, ids in rows])
        self._device = device
        self.flat = torch.from_numpy(offsets + ids).to(device, non_blocking=True)

    def spread(self, values: Sequence[float]) -> torch.Tensor:
        """float32 [N]: one value per row, for each of its places."""
        repeated = np.repeat(np.asarray(values, dtype=np.float32), self._counts)
        return torch.from_numpy(repeated).to(self._device, non_blocking=True)


def needed(state: SamplingState) -> bool:
    """Whether `adjust` would change the state's row now."""
    return bool(state.counted or state.repetition or len(state.bias_ids) or state.ends_masked)


def adjust(logits: torch.Tensor, states: Sequence[SamplingState], bitmask: torch.Tensor | None) -> None:
    """Changes logits (float32 [R, V], contiguous) in place, in vLLM's order:

    1. the grammar's bitmask (int32 [R, ceil(V / 32)], bit i of word w: token 32 w + i is allowed): others become -inf;
    2. EOS and stop ids become -inf until `min_tokens` were generated, unless the grammar allows nothing else;
    3. logit_bias is added;
    4. repetition penalty r (CTRL, Keskar et al. 2019): tokens of prompt and generation are divided by r where positive and
       multiplied by r where negative;
    5. frequency and presence penalty (OpenAI): frequency * count + presence is taken off generated tokens.
    """
    if bitmask is not None:
        _forbid(logits, bitmask)
    _mask_ends(logits, states)
    flat = logits.view(-1)
    places, chosen = _places(logits, states, lambda state: state.bias_ids)
    if places is not None:
        bias = np.concatenate([state.bias_values for state in chosen])
        flat[places.flat] += torch.from_numpy(bias).to(logits.device, non_blocking=True)
    places, chosen = _places(logits, states, lambda state: state.seen_ids() if state.repetition else None)
    if places is not None:
        penalty = places.spread([state.params.repetition_penalty for state in chosen])
        values = flat[places.flat]
        flat[places.flat] = torch.where(values > 0, values / penalty, values * penalty)
    places, chosen = _places(logits, states, lambda state: state.counts.ids if state.counted else None)
    if places is not None:
        counts = torch.from_numpy(np.concatenate([state.counts.counts for state in chosen])).to(logits.device)
        frequency = places.spread([state.params.frequency_penalty for state in chosen])
        presence = places.spread([state.params.presence_penalty for state in chosen])
        flat[places.flat] -= frequency * counts + presence


def _places(
    logits: torch.Tensor, states: Sequence[SamplingState], ids_of: Callable[[SamplingState], Indices | None]
) -> tuple[_Places | None, list[SamplingState]]:
    """The places that `ids_of` names, and the states that name any, in the same order. (None, []) where there are none."""
    parts, chosen = [], []
    for row, state in enumerate(states):
        ids = ids_of(state)
        if ids is not None and len(ids):
            parts.append((row, ids))
            chosen.append(state)
    return (_Places(parts, logits.shape[1], logits.device) if parts else None), chosen


def _forbid(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Step 1. On the CPU NumPy unpacks bits many times as fast."""
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        packed = np.ascontiguousarray(bitmask.numpy()).view(np.uint8)
        bits = np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little")
        np.copyto(logits.numpy(), np.float32(-np.inf), where=bits == 0)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask.to(logits.device, non_blocking=True).unsqueeze(-1) >> shifts) & 1
    logits.masked_fill_(allowed.flatten(1)[:, :vocab_size] == 0, -torch.inf)


def _mask_ends(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Step 2. A row that has nothing left gets its end tokens back: a grammar's end goes before `min_tokens`."""
    parts = [
        (row, state.end_ids[state.end_ids < logits.shape[1]]) for row, state in enumerate(states) if state.ends_masked
    ]  # a model's configuration may name an EOS that its head does not have
    if not parts:
        return
    places, flat = _Places(parts, logits.shape[1], logits.device), logits.view(-1)
    before = flat[places.flat]
    flat[places.flat] = -torch.inf
    rows = torch.tensor([row for row, _ in parts], device=logits.device)
    nothing_left = logits[rows].amax(dim=-1) == -torch.inf
    counts = torch.tensor([len(ids) for _, ids in parts], device=logits.device)
    given_back = torch.repeat_interleave(nothing_left, counts, output_size=len(before))
    flat[places.flat] = torch.where(given_back, before, -torch.inf)
