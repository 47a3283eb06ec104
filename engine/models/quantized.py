"""From the name of a quantisation to what it does with a model directory."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoints.errors import CheckpointError
from engine.models.decoder import EMBEDDING, HEAD
from engine.quantization.names import QuantizationName
from engine.quantization.scheme import RoundedScheme, Scheme


def open_scheme(name: QuantizationName, directory: Path) -> Scheme | None:
    """None for `none`. Raises CheckpointError for `gguf` where the directory has no GGUF file."""
    if name == "none":
        return None
    if name == "gguf":
        raise CheckpointError(f"{directory} has no GGUF file; choose another quantization than gguf.")
    return RoundedScheme(name, (EMBEDDING, HEAD))
