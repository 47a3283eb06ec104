"""The formats that `--quantization` takes. Needs no torch: the command line reads it."""

from __future__ import annotations

from typing import Literal

QuantizationName = Literal["none", "int8", "int4", "gguf"]
QUANTIZATIONS: tuple[QuantizationName, ...] = ("none", "int8", "int4", "gguf")
