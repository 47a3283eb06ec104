"""The blocks of a GGUF file as quantised matrices: those of 4 and 8 bits in groups of 32 exactly, others in 8 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.gguf_blocks import read_kinds
from engine.checkpoints.weight_files import read_weight_file
from engine.quantization.int8 import quantize_int8
from engine.quantization.matrix import QuantizedMatrix, check_finite, stack_rows

GROUP = 32
_CHUNK_BYTES = 1 << 20


class GGUFScheme:
    """Takes every matrix as the GGUF file has it, from the blocks that were kept beside the converted checkpoint.

    A fused matrix whose parts are of different kinds, and a kind that is neither Q4_0, Q4_1 nor Q8_0, is brought to eight bits
    in groups of 32. What the file holds as floating-point numbers is not quantised.
    """

    name = "gguf"

    def __init__(self, blocks: Path) -> None:
        """blocks: see `engine.checkpoints.gguf_blocks`. Raises CheckpointError when it cannot be read."""
        self.files: tuple[Path, ...] = (blocks,)
        self._path = blocks
        self._kinds = read_kinds(read_weight_file(blocks))
        self._made: Counter[str] = Counter()

    def stored(self, names: Sequence[str]) -> QuantizedMatrix | None:
        """See `engine.quantization.scheme.Scheme`. Raises CheckpointError for blocks that cannot be read."""
        if not all(name in self._kinds for name in names):
            return None
        try:
            with safe_open(str(self._path), framework="pt", device="cpu") as file:
                parts = [unpack(file.get_tensor(name), self._kinds[name]) for name in names]
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self._path}: {', '.join(names)}: {error}. Fetch the model again.") from error
        kinds = "/".join(sorted({self._kinds[name] for name in names}))
        if len({(part.bits, part.group) for part in parts}) > 1:
            parts = [part if part.bits == 8 else quantize_int8(part.dequantize(), GROUP) for part in parts]
            self._made[f"of {kinds} in 8 bits, groups of {GROUP}"] += 1
        elif all(self._kinds[name] in _EXACT for name in names):
            self._made[f"as {kinds}"] += 1
        else:
            self._made[f"of {kinds} in 8 bits, groups of {parts[0].group}"] += 1
        return stack_rows(parts)

    def quantizes(self, names: Sequence[str]) -> bool:
        """A fused matrix of which the file has some parts quantised and others not."""
        mixed = any(name in self._kinds for name in names)
        if not mixed:
            self._made["not quantised"] += 1
        return mixed

    def quantize(self, names: Sequence[str], weight: torch.Tensor) -> QuantizedMatrix:
        """See `engine.quantization.scheme.Scheme`."""
        self._made[f"half quantised in 8 bits, groups of {GROUP}"] += 1
        return quantize_int8(weight, GROUP if weight.shape[1] % GROUP == 0 else None)

    def summary(self) -> str:
        """See `engine.quantization.scheme.Scheme`."""
        return ", ".join(f"{count} matrices {how}" for how, count in self._made.items())


def unpack(blocks: torch.Tensor, kind: str) -> QuantizedMatrix:
    """blocks: uint8 [n, bytes of a row], as GGUF has them; kind: its name for their type -> the matrix that they hold.

    Exact for Q4_0, Q4_1 and Q8_0, of which each block is a group; others are dequantised (package `gguf`, the format's own)
    and brought to eight bits. Raises ValueError for blocks that are no such matrix, and for infinities and NaNs.
    """
    layout = _EXACT.get(kind)
    if layout is None:
        return _requantized(blocks, kind)
    size, bits, decode = layout
    rows, width = blocks.shape
    if width % size:
        raise ValueError(f"a row of {width} bytes is no whole number of {kind} blocks")
    groups = width // size
    codes = torch.empty((rows, groups, GROUP), dtype=torch.uint8)
    scale = torch.empty((rows, groups), dtype=torch.float32)
    minimum = torch.empty_like(scale)
    step = max(1, _CHUNK_BYTES // width)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        decode(blocks[part].view(-1, groups, size), codes[part], scale[part], minimum[part])
    check_finite(scale)
    check_finite(minimum)
    return QuantizedMatrix(codes.view(rows, -1), scale, minimum, bits=bits, group=GROUP)


def _q4_0(blocks: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> None:
    """d float16, 16 bytes of two codes; d * (code - 8)."""
    scale.copy_(_half(blocks, 0))
    torch.mul(scale, -8.0, out=minimum)
    _nibbles(blocks[..., 2:], codes)


def _q4_1(blocks: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> None:
    """d and m float16, 16 bytes of two codes; d * code + m."""
    scale.copy_(_half(blocks, 0))
    minimum.copy_(_half(blocks, 2))
    _nibbles(blocks[..., 4:], codes)


def _q8_0(blocks: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> None:
    """d float16, 32 signed bytes; d * byte."""
    scale.copy_(_half(blocks, 0))
    torch.mul(scale, -128.0, out=minimum)
    torch.bitwise_xor(blocks[..., 2:], 0x80, out=codes)


_Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
_EXACT: dict[str, tuple[int, int, _Decode]] = {"Q4_0": (18, 4, _q4_0), "Q4_1": (20, 4, _q4_1), "Q8_0": (34, 8, _q8_0)}
"""Kind -> bytes of a block, bits of a code, and what decodes blocks [n, groups, bytes] into codes, scales and minima."""


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor, codes: torch.Tensor) -> None:
    """The low halves of the 16 bytes are the first 16 weights, the high halves the others."""
    codes[..., :16] = packed & 15
    codes[..., 16:] = packed >> 4


def _requantized(blocks: torch.Tensor, kind: str) -> QuantizedMatrix:
    import gguf

    known = gguf.GGMLQuantizationType.__members__.get(kind)
    if known is None:
        raise ValueError(f"{kind!r} is no kind of GGUF blocks that is known")
    try:
        weight = torch.from_numpy(gguf.dequantize(blocks.numpy(), known))
    except NotImplementedError as error:
        raise ValueError(f"blocks of the kind {kind} cannot be dequantised") from error
    return quantize_int8(weight, GROUP if weight.shape[1] % GROUP == 0 else None)
