"""How a block's bytes are kept below the device: as they are, or in 8 bits with scales.

    raw   the bytes of KV memory: exact
    int8  round to nearest, one float32 scale for each key and value of each head and token (its largest magnitude / 127):
          no element is off by more than 1/254 of that magnitude
    fp8   e4m3 (OCP 8-bit floating point, 4 exponent bits) with one such scale (largest magnitude / 448): no element is off by
          more than 1/16 of itself, or 2**-10 of the scale where that is more

To both comes what rounding to KV memory's own type takes. The codec is part of the key under which a tier keeps blocks, so
blocks of two codecs are never taken for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from offload.checksum import Bytes
from offload.errors import TierUnavailable

CodecName = Literal["raw", "int8", "fp8"]
CODECS: tuple[CodecName, ...] = ("raw", "int8", "fp8")

_INT8_MAX, _FP8_MAX = 127.0, 448.0


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block of KV memory: `rows` runs of `width` elements of `dtype` (the name torch has for it), one for each layer, side
    (key or value), head and token."""

    rows: int
    width: int
    dtype: str

    @property
    def element_bytes(self) -> int:
        return {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.rows * self.width * self.element_bytes


class Codec(Protocol):
    """Turns blocks into what tiers keep, and back. Use from one thread at a time."""

    name: CodecName
    encoded_bytes: int
    """What one block takes."""

    def encode(self, block: Bytes) -> Bytes | None:
        """The encoded bytes, which hold until the next call; for raw the block itself. None for a block that cannot be kept: it
        holds what is no finite number."""

    def decode(self, encoded: Bytes, block: Bytes) -> None:
        """Writes the block that `encode` was given, or what is left of it, to `block`."""


class RawCodec:
    """Exact."""

    name: CodecName = "raw"

    def __init__(self, shape: BlockShape) -> None:
        self.encoded_bytes = shape.block_bytes

    def encode(self, block: Bytes) -> Bytes | None:
        return block

    def decode(self, encoded: Bytes, block: Bytes) -> None:
        np.copyto(block, encoded)


class ScaledCodec:
    """8 bits an element and a float32 scale a row: [codes of all rows][scales of all rows]."""

    def __init__(self, name: CodecName, shape: BlockShape) -> None:
        """Raises TierUnavailable for KV memory that holds 8 bits already."""
        import torch

        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if shape.dtype not in dtypes:
            raise TierUnavailable(f"KV memory in {shape.dtype} is kept as it is; use the codec raw instead of {name}.")
        self.name = name
        self.encoded_bytes = shape.rows * (shape.width + 4)
        self._shape = shape
        self._dtype = dtypes[shape.dtype]
        self._code_dtype = torch.int8 if name == "int8" else torch.float8_e4m3fn
        self._largest = _INT8_MAX if name == "int8" else _FP8_MAX
        self._encoded: Bytes = np.empty(self.encoded_bytes, dtype=np.uint8)

    def encode(self, block: Bytes) -> Bytes | None:
        import torch

        shape = self._shape
        values = torch.from_numpy(block).view(self._dtype).view(shape.rows, shape.width).float()
        scales = values.abs().amax(dim=1, keepdim=True) / self._largest
        if not bool(torch.isfinite(scales).all()):
            return None
        scaled = values / torch.where(scales > 0, scales, torch.ones_like(scales))
        if self._code_dtype == torch.int8:
            scaled = scaled.round_().clamp_(-_INT8_MAX, _INT8_MAX)
        codes = scaled.to(self._code_dtype)
        split = shape.rows * shape.width
        self._encoded[:split] = codes.view(torch.uint8).numpy().reshape(-1)
        self._encoded[split:] = scales.view(-1).numpy().view(np.uint8)
        return self._encoded

    def decode(self, encoded: Bytes, block: Bytes) -> None:
        import torch

        shape = self._shape
        split = shape.rows * shape.width
        codes = torch.from_numpy(encoded[:split]).view(self._code_dtype).view(shape.rows, shape.width)
        scales = torch.from_numpy(encoded[split:].copy()).view(torch.float32).view(shape.rows, 1)
        out = torch.from_numpy(block).view(self._dtype).view(shape.rows, shape.width)
        out.copy_(codes.float().mul_(scales))


def make_codec(name: CodecName, shape: BlockShape) -> Codec:
    """A codec of its own for one thread. Raises TierUnavailable for one that does not fit `shape`."""
    return RawCodec(shape) if name == "raw" else ScaledCodec(name, shape)
