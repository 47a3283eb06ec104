"""A weight matrix of small integers with a scale and a minimum for each group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """W [n, k] with W[i, j] = scale[i, j // group] * codes[i, j] + minimum[i, j // group].

    codes: uint8 [n, k], each below 2 ** bits; scale, minimum: float32 [n, k // group]. `group` divides k; one group for the
    whole row (group == k) is what int8 per output channel means. bits: 4 or 8.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int
    group: int

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def to(self, device: torch.device) -> QuantizedMatrix:
        """The same matrix on another device."""
        return QuantizedMatrix(
            self.codes.to(device), self.scale.to(device), self.minimum.to(device), bits=self.bits, group=self.group
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix that this stands for, [n, k], rounded to `dtype`."""
        rows, columns = self.codes.shape
        wide = self.codes.view(rows, columns // self.group, self.group).float()
        return (wide * self.scale[:, :, None] + self.minimum[:, :, None]).view(rows, columns).to(dtype)


def stack_rows(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Matrices of one kind (bits, group, inputs) as one, their rows one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return QuantizedMatrix(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat([part.minimum for part in parts]),
        bits=first.bits,
        group=first.group,
    )


def check_finite(values: torch.Tensor) -> None:
    """Raises ValueError when scales or minima hold infinities or NaNs: the weights that they are of do, then."""
    if not bool(torch.isfinite(values).all()):
        raise ValueError("the weights hold values that are no finite numbers")
