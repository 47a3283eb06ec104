"""From the name of a quantisation to what it does with a model directory."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.gguf_blocks import BLOCKS
from engine.models.decoder import EMBEDDING, HEAD
from engine.quantization.gguf import GGUFScheme
from engine.quantization.names import QuantizationName
from engine.quantization.scheme import RoundedScheme, Scheme


def open_scheme(name: QuantizationName, directory: Path) -> Scheme | None:
    """None for `none`. Raises CheckpointError for `gguf` where the directory has no blocks of a GGUF file."""
    if name == "none":
        return None
    if name == "gguf":
        blocks = directory / BLOCKS
        if not blocks.is_file():
            raise CheckpointError(
                f"{directory} has no {BLOCKS}, which --quantization gguf needs: the model does not come from a quantised GGUF "
                "file, or was fetched by an earlier version (`turnkeep model pull` then adds it). Choose another quantization."
            )
        return GGUFScheme(blocks)
    return RoundedScheme(name, (EMBEDDING, HEAD))
