"""Weight matrices packed for the C++ products of product.h, and the methods that multiply them."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from engine.kernels.cpu.library import Library, Team
from engine.quantization.matrix import QuantizedMatrix

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class Format(IntEnum):
    """How a packed matrix stores its weights. Mirrors Format of matrix.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    CODES8 = 3
    CODES8_GROUPS = 4
    CODES4_GROUPS = 5


class Method(IntEnum):
    """How a product is computed. Mirrors Method of product.h.

    FMA: float32 multiply-adds, weights widened in registers. HALF: float16 multiply-adds (AVX512-FP16). DOT_BF16, AMX_BF16:
    bfloat16 products summed in float32. DOT_INT16, DOT_INT8: integer products of the codes with activations quantised to 16 or
    8 bits (AVX512-VNNI).
    """

    FMA = 0
    HALF = 1
    DOT_BF16 = 2
    AMX_BF16 = 3
    DOT_INT16 = 4
    DOT_INT8 = 5


GROUP = 32


class MatrixStruct(ctypes.Structure):
    """Mirrors Matrix of matrix.h."""

    _fields_ = (("data", _pointer), ("scale", _pointer), ("n", _int64), ("k", _int64), ("format", _int64))


class _PackArgs(ctypes.Structure):
    """Mirrors PackArgs of matrix.h."""

    _fields_ = (
        *((name, _pointer) for name in ("source", "scale", "minimum", "out")),
        *((name, _int64) for name in ("n", "k", "format", "paired")),
    )


class _MultiplyArgs(ctypes.Structure):
    """Mirrors MultiplyArgs of product.h."""

    _fields_ = (
        ("matrix", MatrixStruct),
        *((name, _pointer) for name in ("x", "out", "team")),
        *((name, _int64) for name in ("rows", "method")),
    )


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """W [n, k] in the order in which a product reads it. `data` and `scale` own the memory that `struct` points into."""

    struct: MatrixStruct
    data: np.ndarray
    scale: torch.Tensor | None

    @property
    def format(self) -> Format:
        return Format(self.struct.format)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


def has_method(library: Library, matrix_format: Format, method: Method) -> bool:
    """Whether this build on this machine multiplies the format by the method."""
    return bool(library.has_method(matrix_format, method))


class Slabs:
    """Memory for packed matrices, one behind the other in huge pages where the system gives them: weights that stream past wait
    for fewer translations, and small matrices share a page. What is taken lives as long as anything that was taken with it."""

    def __init__(self, slab: int = 32 << 20) -> None:
        """slab: bytes to ask the system for at once."""
        self._slab = slab
        self._room = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> np.ndarray:
        """`size` zeroed bytes, 64 bytes aligned."""
        padded = (size + 63) // 64 * 64
        if padded > self._room.size:
            self._room = _pages(max(padded, self._slab))
        taken, self._room = self._room[:size], self._room[padded:]
        return taken


def pack(
    library: Library,
    weight: torch.Tensor | QuantizedMatrix,
    matrix_format: Format,
    *,
    paired: bool = False,
    slabs: Slabs | None = None,
) -> PackedMatrix:
    """Packs W [n, k]; k is a multiple of 32, for float32 of 16. A tensor is rounded to the format; a quantised matrix must be
    of its kind: 8 bits with one group per row and no offset but that of the codes (CODES8), or groups of 32.

    `paired`: W is [gate; up], whose panels alternate (matrix.h). `slabs`: where the matrix is put (default: memory of its own).
    Raises ValueError.
    """
    scale = minimum = None
    if isinstance(weight, QuantizedMatrix):
        if matrix_format is not quantized_format(weight):
            raise ValueError(
                f"a matrix of {weight.bits} bits in groups of {weight.group} is not packed as {matrix_format.name}"
            )
        source = weight.codes.contiguous()
        scale, minimum = weight.scale.float().contiguous(), weight.minimum.float().contiguous()
    else:
        dtypes = {Format.FLOAT32: torch.float32, Format.BFLOAT16: torch.bfloat16, Format.FLOAT16: torch.float16}
        if matrix_format not in dtypes:
            raise ValueError(f"a tensor is not packed as {matrix_format.name}; quantise it first")
        if matrix_format is Format.FLOAT16:
            weight = weight.clamp(-65504, 65504)
        source = weight.to(dtypes[matrix_format]).contiguous()
    n, k = source.shape
    size = int(library.matrix_bytes(matrix_format, n, k))
    packed = (slabs or Slabs(size)).take(size)
    args = _PackArgs(
        source=source.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        minimum=None if minimum is None else minimum.data_ptr(),
        out=packed.ctypes.data,
        n=n,
        k=k,
        format=matrix_format,
        paired=paired,
    )
    library.pack_matrix(args)
    column_scale = _column_scale(scale, paired) if scale is not None and matrix_format is Format.CODES8 else None
    struct = MatrixStruct(
        data=packed.ctypes.data,
        scale=None if column_scale is None else column_scale.data_ptr(),
        n=n,
        k=k,
        format=matrix_format,
    )
    return PackedMatrix(struct, packed, column_scale)


def quantized_format(matrix: QuantizedMatrix) -> Format:
    """The format that holds a quantised matrix exactly. Raises ValueError where there is none."""
    whole_rows = matrix.bits == 8 and matrix.group == matrix.codes.shape[1]
    if whole_rows and torch.equal(matrix.minimum, matrix.scale * -128.0):
        return Format.CODES8
    if matrix.group == GROUP and matrix.bits in (4, 8):
        return Format.CODES4_GROUPS if matrix.bits == 4 else Format.CODES8_GROUPS
    if whole_rows:
        raise ValueError("codes of 8 bits with one scale a row must be symmetrical: minimum = -128 scale")
    raise ValueError(f"no kernel multiplies {matrix.bits} bits in groups of {matrix.group}; groups are {GROUP} inputs or a row")


def _column_scale(scale: torch.Tensor, paired: bool) -> torch.Tensor:
    """[n, 1] -> [n, padded to 32], in the order of the packed columns."""
    column = scale.flatten()
    if paired:
        half = column.shape[0] // 2
        gate, up = (torch.nn.functional.pad(part, (0, -half % 16)).view(-1, 16) for part in (column[:half], column[half:]))
        column = torch.stack((gate, up), dim=1).flatten()
    return torch.nn.functional.pad(column, (0, -column.shape[0] % 32)).contiguous()


_HUGE = 2 << 20


def _pages(size: int) -> np.ndarray:
    """At least `size` zeroed bytes, in huge pages where that is worth it and the system gives them."""
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        room = np.zeros(size + 64, dtype=np.uint8)
        return room[-room.ctypes.data % 64 :]
    size = (size + _HUGE - 1) // _HUGE * _HUGE
    region = mmap.mmap(-1, size + _HUGE)
    region.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(region, dtype=np.uint8)
    return room[-room.ctypes.data % _HUGE :][:size]


def multiply(library: Library, team: Team, matrix: PackedMatrix, x: torch.Tensor, method: Method) -> torch.Tensor:
    """x [m, k] W^T, float32 [m, n]. x: float32. Raises ValueError for a method that this machine or format has not."""
    if not has_method(library, matrix.format, method):
        raise ValueError(f"{matrix.format.name} is not multiplied by {method.name} on this machine")
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != matrix.struct.k:
        raise ValueError(f"x must be float32 [m, {matrix.struct.k}], not {x.dtype} {tuple(x.shape)}")
    x = x.contiguous()
    out = torch.empty((x.shape[0], matrix.struct.n), dtype=torch.float32)
    args = _MultiplyArgs(
        matrix=matrix.struct, x=x.data_ptr(), out=out.data_ptr(), team=team.handle, rows=x.shape[0], method=method
    )
    library.multiply(args)
    return out
