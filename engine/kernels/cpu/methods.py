"""Which method multiplies which format, at few rows and at many: measured once on each machine and kept."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.kernels.cpu.library import Library, Team
from engine.kernels.cpu.matrix import GROUP, Format, Method, PackedMatrix, has_method, multiply, pack
from engine.quantization.matrix import QuantizedMatrix

_int32 = ctypes.c_int32


class MethodStruct(ctypes.Structure):
    """Mirrors MethodChoice of decoder.h."""

    _fields_ = (("few", _int32), ("many", _int32), ("few_rows", _int32))


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """`few` multiplies up to `few_rows` rows, `many` more."""

    few: Method
    many: Method
    few_rows: int

    def struct(self) -> MethodStruct:
        return MethodStruct(self.few, self.many, self.few_rows)


Choose = Callable[[Format], MethodChoice]


def plain(_: Format) -> MethodChoice:
    """What every machine can: float32 multiply-adds throughout."""
    return MethodChoice(Method.FMA, Method.FMA, 0)


# Methods as good as float32 activations, and those that round the activations to what the format is for. The former are
# preferred where both are about as fast: few rows wait for memory.
_PRECISE = {
    Format.FLOAT32: (Method.FMA,),
    Format.BFLOAT16: (Method.FMA,),
    Format.FLOAT16: (Method.FMA,),
    Format.CODES8: (Method.FMA, Method.DOT_INT16),
    Format.CODES8_GROUPS: (Method.FMA, Method.DOT_INT16),
    Format.CODES4_GROUPS: (Method.FMA, Method.DOT_INT16),
}
_FAST = {
    Format.FLOAT32: (),
    Format.BFLOAT16: (Method.DOT_BF16, Method.AMX_BF16),
    Format.FLOAT16: (Method.HALF,),
    Format.CODES8: (Method.DOT_INT8,),
    Format.CODES8_GROUPS: (Method.DOT_INT8,),
    Format.CODES4_GROUPS: (Method.DOT_INT8,),
}
_WORTH = 1.25  # a fast method must be faster than a precise one by this factor
_FEW = (1, 2, 4, 8, 16, 32)
_MANY = 192
_SHAPE = (3072, 1024)  # of the matrix that is measured: larger than a second-level cache
_TIMES = 6
_VERSION = 1


def candidates(library: Library, matrix_format: Format) -> tuple[list[Method], list[Method]]:
    """(precise, fast) methods that this machine has for a format."""
    precise, fast = _PRECISE[matrix_format], _FAST[matrix_format]
    return [m for m in precise if has_method(library, matrix_format, m)], [
        m for m in fast if has_method(library, matrix_format, m)
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one format: the choice, and seconds of a product of many rows by it."""

    choice: MethodChoice
    seconds: float


def measure(library: Library, team: Team, matrix_format: Format) -> Measured:
    """Times the candidates of a format, some tens of milliseconds each."""
    precise, fast = candidates(library, matrix_format)
    matrix = _random_matrix(library, matrix_format)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((_MANY, _SHAPE[1]), generator=generator)

    def seconds(method: Method, rows: int) -> float:
        # The fastest, not the median: whatever else runs now, another replica that starts perhaps, must not decide for good.
        times = []
        for _ in range(_TIMES):
            began = time.perf_counter()
            multiply(library, team, matrix, x[:rows], method)
            times.append(time.perf_counter() - began)
        return min(times)

    few = min(precise, key=lambda method: seconds(method, 2)) if len(precise) > 1 else precise[0]
    at_many = {method: seconds(method, _MANY) for method in (*precise, *fast)}
    many = min(at_many, key=lambda method: at_many[method])
    if many is few:
        return Measured(MethodChoice(few, few, 0), at_many[many])
    few_rows = 0
    for rows in _FEW:
        if seconds(few, rows) > seconds(many, rows) * _WORTH:
            break
        few_rows = rows
    return Measured(MethodChoice(few, many, few_rows), at_many[many])


def _random_matrix(library: Library, matrix_format: Format) -> PackedMatrix:
    rows, columns = _SHAPE
    generator = torch.Generator().manual_seed(1)
    if matrix_format <= Format.FLOAT16:
        return pack(library, torch.randn((rows, columns), generator=generator), matrix_format)
    bits = 4 if matrix_format is Format.CODES4_GROUPS else 8
    group = columns if matrix_format is Format.CODES8 else GROUP
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    scale = torch.full((rows, columns // group), 0.01)
    return pack(library, QuantizedMatrix(codes, scale, scale * -(2.0 ** (bits - 1)), bits, group), matrix_format)


class MethodTable:
    """Measurements of one machine and number of threads, kept in a file beside the built kernels."""

    def __init__(self, library: Library, team: Team) -> None:
        self._library = library
        self._team = team
        self._path = library.path.with_name(f"{library.path.stem}-{team.threads}.methods.json")
        self._measured = self._read()

    def __call__(self, matrix_format: Format) -> MethodChoice:
        """What multiplies a format on this machine."""
        return self.of(matrix_format).choice

    def describe(self, matrix_format: Format) -> str:
        """For a log line."""
        choice = self(matrix_format)
        name = matrix_format.name.lower()
        if choice.few is choice.many or choice.few_rows == 0:
            return f"{name} by {choice.many.name.lower()}"
        return f"{name} by {choice.few.name.lower()} up to {choice.few_rows} rows, then by {choice.many.name.lower()}"

    def of(self, matrix_format: Format) -> Measured:
        """What was measured of a format, now or at an earlier start."""
        known = self._measured.get(matrix_format)
        if known is None:
            known = measure(self._library, self._team, matrix_format)
            self._measured[matrix_format] = known
            self._write()
        return known

    def half_format(self) -> Format:
        """How 16-bit weights are stored here: as bfloat16 or as float16, whichever multiplies many rows faster."""
        return min((Format.BFLOAT16, Format.FLOAT16), key=lambda f: self.of(f).seconds)

    def _read(self) -> dict[Format, Measured]:
        """Nothing where the file is missing, damaged, of another version or names what this machine has not."""
        try:
            content = json.loads(self._path.read_text())
            if content["version"] != _VERSION:
                return {}
            measured = {}
            for name, entry in content["formats"].items():
                choice = MethodChoice(Method[entry["few"]], Method[entry["many"]], int(entry["few_rows"]))
                measured[Format[name]] = Measured(choice, float(entry["seconds"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        usable = all(has_method(self._library, f, m) for f, e in measured.items() for m in (e.choice.few, e.choice.many))
        return measured if usable else {}

    def _write(self) -> None:
        content = {
            "version": _VERSION,
            "formats": {
                f.name: {
                    "few": e.choice.few.name,
                    "many": e.choice.many.name,
                    "few_rows": e.choice.few_rows,
                    "seconds": e.seconds,
                }
                for f, e in self._measured.items()
            },
        }
        with contextlib.suppress(OSError):  # it is measured again at the next start
            handle, part = tempfile.mkstemp(dir=self._path.parent, suffix=".json.part")
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            Path(part).replace(self._path)
