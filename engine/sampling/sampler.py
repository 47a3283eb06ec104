"""From logits to tokens, for a batch of rows that each have their own parameters.

Order of operations: raw log-probabilities are set aside (`logprobs`); grammar, min_tokens, logit_bias and penalties change
the logits (`adjust`); greedy rows (temperature under 1e-5) take the largest, the first of equals; the others go through
temperature, min_p, top_k, top_p and the Gumbel race (`choose_device` says how; `choose_cpu` and, in C++ for all rows at once, a
`RowChooser` do the same on a CPU).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling import choose_device
from engine.sampling.adjust import adjust, needed
from engine.sampling.choose_cpu import CPUChooser
from engine.sampling.logprobs import report
from engine.sampling.philox import stream_keys
from engine.sampling.state import SamplingState

BROKEN_LOGITS = "The model's logits hold NaN or infinity; its weights or a kernel are broken."
NOTHING_ALLOWED = "No token is allowed: the grammar leaves none that the model can give; loosen the grammar."


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's choice. `error` is a sentence where the row could not be sampled; token_id is then -1 and the rest empty.

    logprob, top: natural logarithms of the softmax of the model's own logits, as `SamplingParams.logprobs` asks for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


class RowChooser(Protocol):
    """Chooses for all rows at once, without the GIL (engine.kernels.cpu.sampling)."""

    def choose(
        self, logits: torch.Tensor, states: Sequence[SamplingState], bitmask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 [R], the tokens; float32 [R] twice, the largest logit of each row that the bitmask allows and of all."""

    def report(
        self, logits: torch.Tensor, token_ids: torch.Tensor, tops: Sequence[int]
    ) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        """As `engine.sampling.logprobs.report`."""


class Sampler:
    """Samples one token per row. A row's outcome depends on its own logits, mask and state alone. One thread at a time.

    vocab_size: V, how many logits a row has. device: where they lie. chooser: for a CPU; None: NumPy.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", chooser: RowChooser | None = None) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._cpu = CPUChooser(vocab_size) if self._device.type == "cpu" else None
        self._chooser = chooser

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, states: Sequence[SamplingState], bitmask: torch.Tensor | None = None
    ) -> list[SampledToken]:
        """The next token of every row; states and logits stay as they are (append the token to its state yourself).

        logits: float32 [R, V]; states: R of them; bitmask: int32 [R, ceil(V / 32)] as XGrammar fills it, bit set = allowed,
        or None where nothing is forbidden. A row with NaN or infinite logits, or with no token allowed, gets an `error`;
        other rows do not notice. Raises ValueError where the shapes do not fit together.
        """
        self._check(logits, len(states), bitmask)
        if not states:
            return []
        adjusted = logits
        adjusts = any(map(needed, states))
        if self._chooser is not None and not adjusts:
            chosen, largest, raw_largest = self._chooser.choose(logits, states, bitmask)
            return self._results(logits, states, chosen, largest.tolist(), raw_largest.tolist())
        if bitmask is not None or adjusts:
            adjusted = logits.clone(memory_format=torch.contiguous_format)
            adjust(adjusted, states, bitmask)
        if self._chooser is not None:
            chosen, largest, _ = self._chooser.choose(adjusted, states, None)
            return self._results(logits, states, chosen, largest.tolist(), self._largest(logits)[1].tolist())
        chosen, largest = self._largest(adjusted)
        raw_largest = largest if adjusted is logits else self._largest(logits)[1]
        random = [row for row, state in enumerate(states) if not state.greedy]
        if random:
            self._draw(adjusted, states, random, chosen, largest)
        return self._results(logits, states, chosen, largest.tolist(), raw_largest.tolist())

    def _check(self, logits: torch.Tensor, rows: int, bitmask: torch.Tensor | None) -> None:
        if tuple(logits.shape) != (rows, self._vocab_size) or logits.dtype != torch.float32:
            message = f"Logits must be float32 [{rows}, {self._vocab_size}], not {logits.dtype} {list(logits.shape)}."
            raise ValueError(message)
        words = (self._vocab_size + 31) // 32
        if bitmask is not None and (tuple(bitmask.shape) != (rows, words) or bitmask.dtype != torch.int32):
            raise ValueError(f"The bitmask must be int32 [{rows}, {words}], not {bitmask.dtype} {list(bitmask.shape)}.")

    def _largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [R] and float32 [R]: where each row is largest, first of equals, and how large. NaN counts as largest."""
        on_cpu = self._cpu is not None  # NumPy's argmax is vectorised, torch's is not
        token_ids = torch.from_numpy(np.argmax(logits.numpy(), axis=-1)) if on_cpu else torch.argmax(logits, dim=-1)
        return token_ids, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)

    def _draw(
        self,
        adjusted: torch.Tensor,
        states: Sequence[SamplingState],
        rows: list[int],
        chosen: torch.Tensor,
        largest: torch.Tensor,
    ) -> None:
        """Replaces `chosen` of these rows by what their random numbers say."""
        drawn = [states[row] for row in rows]
        keys = stream_keys([s.seed for s in drawn], [s.choice for s in drawn], [s.position for s in drawn])
        if self._cpu is None:
            where = torch.tensor(rows, device=self._device)
            chosen[where] = choose_device.choose(adjusted[where], drawn, keys, largest[where])
            return
        table: npt.NDArray[np.float32] = adjusted.numpy()
        for row, state, key in zip(rows, drawn, keys, strict=True):
            value, params = float(largest[row]), state.params
            if math.isfinite(value):
                chosen[row] = self._cpu.choose(
                    table[row],
                    value,
                    key,
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                )

    def _results(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        chosen: torch.Tensor,
        largest: list[float],
        raw_largest: list[float],
    ) -> list[SampledToken]:
        errors = [_error(raw, value) for raw, value in zip(raw_largest, largest, strict=True)]
        results = [
            SampledToken(token_id) if error is None else SampledToken(-1, error=error)
            for token_id, error in zip(chosen.tolist(), errors, strict=True)
        ]
        rows, tops = [], []
        for row, state in enumerate(states):
            if state.params.logprobs is not None and errors[row] is None:
                rows.append(row)
                tops.append(state.params.logprobs)
        if rows:
            where = torch.tensor(rows, device=self._device)
            reported = (self._chooser.report if self._chooser is not None else report)(logits[where], chosen[where], tops)
            for row, (logprob, top) in zip(rows, reported, strict=True):
                results[row] = SampledToken(results[row].token_id, logprob, top)
        return results


def _error(raw_largest: float, largest: float) -> str | None:
    """What is wrong with a row, from its largest logit before and after adjusting."""
    if not math.isfinite(raw_largest):
        return BROKEN_LOGITS
    return None if math.isfinite(largest) else NOTHING_ALLOWED
