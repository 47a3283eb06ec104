"""What becomes of each matrix of a checkpoint: the choice behind `--quantization`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from engine.quantization.int4 import GROUP, quantize_int4
from engine.quantization.int8 import quantize_int8
from engine.quantization.matrix import QuantizedMatrix

logger = logging.getLogger(__name__)

SCHEME_VERSION = 1
"""Counts changes of the codes that a scheme makes of the same weights: KV of one version is not that of another."""


class Scheme(Protocol):
    """Turns the matrices of a checkpoint, called by their names there, into quantised ones. Names of several: one fused
    matrix, their rows one after the other."""

    name: str
    files: tuple[Path, ...]
    """What it reads beside the checkpoint's weight files; the model's fingerprint covers them."""

    def stored(self, names: Sequence[str]) -> QuantizedMatrix | None:
        """The matrix as it lies on the disk in its quantised form, or None where there is none."""

    def quantizes(self, names: Sequence[str]) -> bool:
        """Whether `quantize` is to be called for a matrix that is not stored; else its weights are used as they are."""

    def quantize(self, names: Sequence[str], weight: torch.Tensor) -> QuantizedMatrix:
        """weight [n, k] -> the matrix that stands for it. Raises ValueError for infinities and NaNs."""

    def summary(self) -> str:
        """What was done so far, for the log."""


class RoundedScheme:
    """int8: every matrix in eight bits per output channel. int4: four bits in groups of 32 inputs; the head, and a matrix whose
    inputs are no multiple of 32, in eight bits."""

    def __init__(self, name: str, heads: Sequence[str]) -> None:
        """name: int8 or int4. heads: what the head's matrix may be called."""
        self.name = name
        self.files: tuple[Path, ...] = ()
        self._heads = frozenset(heads)
        self._made: Counter[str] = Counter()

    def stored(self, names: Sequence[str]) -> QuantizedMatrix | None:
        """Nothing is stored: the weights are rounded anew at every start."""
        return None

    def quantizes(self, names: Sequence[str]) -> bool:
        """Every matrix."""
        return True

    def quantize(self, names: Sequence[str], weight: torch.Tensor) -> QuantizedMatrix:
        """See `Scheme`."""
        if self.name == "int4" and self._heads.isdisjoint(names):
            if weight.shape[1] % GROUP == 0:
                self._made[f"in 4 bits, groups of {GROUP}"] += 1
                return quantize_int4(weight)
            logger.warning(
                "%s: %d inputs are no multiple of %d; this matrix is kept in 8 bits.", ", ".join(names), weight.shape[1], GROUP
            )
        self._made["in 8 bits, one scale for each output"] += 1
        return quantize_int8(weight)

    def summary(self) -> str:
        """See `Scheme`."""
        return ", ".join(f"{count} matrices {how}" for how, count in self._made.items())
