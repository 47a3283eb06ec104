"""Choosing tokens in C++ (sampling.h): a row at a time, rows on all threads, the vocabulary never sorted."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.cpu.library import Library, Team
from engine.sampling.logprobs import LEAST
from engine.sampling.state import SamplingState

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _SampleArgs(ctypes.Structure):
    """Mirrors SampleArgs of sampling.h."""

    _fields_ = (
        *((name, _pointer) for name in ("logits", "bitmask", "seed", "position", "choice", "temperature", "least")),
        *((name, _pointer) for name in ("top_p", "top_k", "chosen", "largest", "raw_largest", "team")),
        *((name, _int64) for name in ("rows", "vocab", "stride", "mask_words", "mask_stride")),
    )


class _ReportArgs(ctypes.Structure):
    """Mirrors ReportArgs of sampling.h."""

    _fields_ = (
        *((name, _pointer) for name in ("logits", "chosen", "tops", "logprob", "top_logprob", "top_id", "team")),
        *((name, _int64) for name in ("rows", "vocab", "stride", "most")),
        ("floor", ctypes.c_float),
    )


class CpuSampler:
    """Rows of logits to tokens. Threads wait for each other as `Team` says."""

    def __init__(self, library: Library, team: Team) -> None:
        self._library = library
        self._team = team

    def choose(
        self, logits: torch.Tensor, states: Sequence[SamplingState], bitmask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 [R], the tokens; float32 [R], the largest allowed logit of each row; float32 [R], the largest one.

        logits: float32 [R, V], rows contiguous, R > 0; bitmask: int32 [R, ceil(V / 32)], rows contiguous, or None. A row that
        has NaN, infinity, or nothing allowed gets any token; its largest logits tell.
        """
        rows, vocab = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        if bitmask is not None and bitmask.stride(1) != 1:
            bitmask = bitmask.contiguous()
        chosen = torch.empty(rows, dtype=torch.int64)
        largest, raw_largest = torch.empty(rows), torch.empty(rows)
        args = _SampleArgs(
            logits=logits.data_ptr(),
            bitmask=None if bitmask is None else bitmask.data_ptr(),
            chosen=chosen.data_ptr(),
            largest=largest.data_ptr(),
            raw_largest=raw_largest.data_ptr(),
            team=self._team.handle,
            rows=rows,
            vocab=vocab,
            stride=logits.stride(0),
            mask_words=(vocab + 31) // 32,
            mask_stride=0 if bitmask is None else bitmask.stride(0),
        )
        settings = [] if all(state.greedy for state in states) else _settings(states)
        for name, values in settings:
            setattr(args, name, values.ctypes.data)
        self._library.sample(args)
        return chosen, largest, raw_largest

    def report(
        self, logits: torch.Tensor, token_ids: torch.Tensor, tops: Sequence[int]
    ) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        """As `engine.sampling.logprobs.report`: for N > 0 rows, float32 [N, V], without NaN and +infinity."""
        rows, vocab = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        token_ids = token_ids.contiguous()
        most = min(max(tops), vocab)
        logprob, top_logprob = torch.empty(rows), torch.empty((rows, most))
        top_id = torch.empty((rows, most), dtype=torch.int64)
        counts = torch.tensor(tops, dtype=torch.int64)
        self._library.report(
            _ReportArgs(
                logits=logits.data_ptr(),
                chosen=token_ids.data_ptr(),
                tops=counts.data_ptr(),
                logprob=logprob.data_ptr(),
                top_logprob=top_logprob.data_ptr(),
                top_id=top_id.data_ptr(),
                team=self._team.handle,
                rows=rows,
                vocab=vocab,
                stride=logits.stride(0),
                most=most,
                floor=LEAST,
            )
        )
        ids, values = top_id.tolist(), top_logprob.tolist()
        return [
            (chosen, tuple(zip(ids[row][:top], values[row][:top], strict=True)))
            for row, (chosen, top) in enumerate(zip(logprob.tolist(), tops, strict=True))
        ]


def _settings(states: Sequence[SamplingState]) -> list[tuple[str, npt.NDArray[Any]]]:
    """What the rows ask for, by the names of SampleArgs."""
    params = [state.params for state in states]
    return [
        ("seed", np.array([state.seed for state in states], dtype=np.uint64)),
        ("position", np.array([state.position for state in states], dtype=np.uint64)),
        ("choice", np.array([state.choice for state in states], dtype=np.uint32)),
        ("temperature", np.array([0.0 if state.greedy else state.params.temperature for state in states], dtype=np.float32)),
        ("least", np.array([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params], dtype=np.float32)),
        ("top_p", np.array([p.top_p for p in params], dtype=np.float64)),
        ("top_k", np.array([p.top_k for p in params], dtype=np.int64)),
    ]
