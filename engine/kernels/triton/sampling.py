"""Choosing tokens on an NVIDIA GPU, behind engine.sampling.sampler.RowChooser."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton

from engine.kernels.triton.device import sampling as device
from engine.sampling.logprobs import LEAST, by_integer_keys
from engine.sampling.philox import stream_keys
from engine.sampling.state import SamplingState

CHUNK = 4096
"""Tokens of a row that one program takes."""

ROW_BLOCK = 8192
"""Tokens that a program which has a row to itself takes at a time."""

MOST_EXTRACTED = 64
"""More most likely tokens than this are left to torch's topk: each costs a pass over every chunk."""


class TritonSampler:
    """Rows of logits to tokens; nothing is read back. Logits and results lie on one device."""

    def choose(
        self, logits: torch.Tensor, states: Sequence[SamplingState], bitmask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 [R], the tokens; float32 [R], the largest allowed logit of each row; float32 [R], the largest one.

        logits: float32 [R, V], R > 0; bitmask: int32 [R, ceil(V / 32)], on any device, or None. A row that has NaN, infinity,
        or nothing allowed gets any token; its largest logits tell.
        """
        logits = _rows_together(logits)
        rows, vocab = logits.shape
        where = logits.device
        mask = logits if bitmask is None else _rows_together(bitmask.to(where, non_blocking=True))
        masked = bitmask is not None
        chunk = _block(vocab, CHUNK)
        chunks = triton.cdiv(vocab, chunk)
        padded = triton.next_power_of_2(chunks)
        raw, best, winner = torch.empty((3, rows, chunks), dtype=torch.float32, device=where)
        best_at, winner_at = torch.empty((2, rows, chunks), dtype=torch.int32, device=where)
        threshold = torch.empty(rows, dtype=torch.int32, device=where)
        integers = _settings(states).to(where, non_blocking=True)
        floats = integers.view(torch.float64)
        row_of = (vocab, logits.stride(0), mask.stride(0))
        cut = [_cuts(state, vocab) for state in states]
        device.maxima[(rows, chunks)](
            logits, mask, raw, best, best_at, *row_of, CHUNKS=chunks, BLOCK=chunk, MASKED=masked, enable_fp_fusion=False
        )
        if any(cut):
            device.thresholds[(rows,)](
                logits,
                mask,
                best,
                integers,
                floats,
                threshold,
                rows,
                *row_of,
                CHUNKS=chunks,
                CHUNKS_PADDED=padded,
                BLOCK=_block(vocab, ROW_BLOCK),
                UNIT_BITS=min(44, 62 - math.ceil(math.log2(max(2, vocab)))),
                MASKED=masked,
                num_warps=16,
                enable_fp_fusion=False,
            )
        if not all(state.greedy for state in states):
            device.race[(rows, chunks)](
                logits,
                mask,
                best,
                integers,
                floats,
                threshold,
                winner,
                winner_at,
                rows,
                *row_of,
                CHUNKS=chunks,
                CHUNKS_PADDED=padded,
                BLOCK=chunk,
                MASKED=masked,
                CUT=any(cut),
                num_warps=8,
                enable_fp_fusion=False,
            )
        chosen = torch.empty(rows, dtype=torch.int64, device=where)
        largest, raw_largest = torch.empty((2, rows), dtype=torch.float32, device=where)
        device.finish[(rows,)](
            raw,
            best,
            best_at,
            winner,
            winner_at,
            floats,
            chosen,
            largest,
            raw_largest,
            rows,
            CHUNKS=chunks,
            CHUNKS_PADDED=padded,
            enable_fp_fusion=False,
        )
        return chosen, largest, raw_largest

    def report(
        self, logits: torch.Tensor, token_ids: torch.Tensor, tops: Sequence[int]
    ) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        """As `engine.sampling.logprobs.report`: for N > 0 rows, float32 [N, V], without NaN and +infinity."""
        logits = _rows_together(logits)
        rows, vocab = logits.shape
        most = min(max(tops), vocab)
        extracted = most if most <= MOST_EXTRACTED else 0
        chunk = _block(vocab, CHUNK)
        chunks = triton.cdiv(vocab, chunk)
        sums, peaks = torch.empty((2, rows, chunks), dtype=torch.float32, device=logits.device)
        keys = torch.empty((rows, chunks, max(1, extracted)), dtype=torch.int64, device=logits.device)
        device.most_likely[(rows, chunks)](
            logits,
            sums,
            peaks,
            keys,
            vocab,
            logits.stride(0),
            extracted,
            CHUNKS=chunks,
            BLOCK=chunk,
            enable_fp_fusion=False,
        )
        total = (peaks.double() + sums.double().log()).logsumexp(1, keepdim=True)
        if most == 0:
            top_ids = token_ids.new_empty((rows, 0))
        elif extracted:
            top_ids = 0xFFFFFFFF - (torch.topk(keys.flatten(1), most, dim=-1).values & 0xFFFFFFFF)
        else:
            top_ids = by_integer_keys(logits, most)
        wanted = torch.cat((token_ids.unsqueeze(1), top_ids), 1)
        logprobs = (logits.gather(1, wanted).double() - total).clamp_(min=LEAST).float()
        ids, values = top_ids.tolist(), logprobs.tolist()
        return [
            (row[0], tuple(zip(found[:top], row[1 : top + 1], strict=True)))
            for found, row, top in zip(ids, values, tops, strict=True)
        ]


def _block(vocab: int, most: int) -> int:
    return int(min(most, max(16, triton.next_power_of_2(vocab))))


def _rows_together(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _cuts(state: SamplingState, vocab: int) -> bool:
    params = state.params
    return not state.greedy and (params.min_p > 0.0 or params.top_p < 1.0 or 0 < params.top_k < vocab)


def _settings(states: Sequence[SamplingState]) -> torch.Tensor:
    """int64 [5, R], so that one copy takes all to the device: stream keys, top_k, and as float64 temperature (0: greedy),
    top_p and the logarithm of min_p."""
    settings = np.empty((5, len(states)), dtype=np.int64)
    floats = settings.view(np.float64)
    keys = stream_keys([s.seed for s in states], [s.choice for s in states], [s.position for s in states])
    settings[0] = keys.view(np.int64)
    settings[1] = [state.params.top_k for state in states]
    floats[2] = [0.0 if state.greedy else state.params.temperature for state in states]
    floats[3] = [state.params.top_p for state in states]
    floats[4] = [math.log(state.params.min_p) if state.params.min_p > 0.0 else -math.inf for state in states]
    return torch.from_numpy(settings)
