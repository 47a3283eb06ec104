"""The quantised tensors of a GGUF file, kept beside the checkpoint that it was converted to. Needs no torch.

One safetensors file: each tensor by the name it has in the checkpoint, uint8 [rows, bytes of a row]: the file's own blocks.
Its metadata `kinds`, a JSON object, says of which kind they are (Q4_1, Q8_0, ...). Blocks lie within rows, so that rows in
another order keep them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.weight_files import WeightFile

BLOCKS = "quantized.blocks"
KINDS = "kinds"


def write_blocks(directory: Path, tensors: Iterable[tuple[str, str, npt.NDArray[np.uint8]]]) -> None:
    """tensors: (name, kind, blocks [rows, bytes of a row]) each. Writes no file when there is none."""
    kept = [(name, kind, np.ascontiguousarray(blocks)) for name, kind, blocks in tensors]
    if not kept:
        return
    specs = {
        name: safetensors.TensorSpec(dtype="uint8", shape=blocks.shape, data_ptr=blocks.ctypes.data, data_len=blocks.nbytes)
        for name, _, blocks in kept
    }
    path = directory / BLOCKS
    kinds = msgspec.json.encode({name: kind for name, kind, _ in sorted(kept, key=lambda item: item[0])}).decode()
    # One key only: several would be written in another order every time, and the file would have another digest.
    safetensors.serialize_file(specs, str(path), {KINDS: kinds})
    path.chmod(0o644)  # safetensors makes it readable by its owner alone


def read_kinds(file: WeightFile) -> dict[str, str]:
    """Tensor name -> kind, of the header of such a file. Raises CheckpointError when a tensor has none."""
    try:
        kinds = msgspec.json.decode(file.metadata.get(KINDS, ""), type=dict[str, str])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{file.path} does not say of which kinds its tensors are. Fetch the model again.") from error
    missing = sorted(file.tensors.keys() - kinds.keys())
    if missing:
        raise CheckpointError(f"{file.path} does not say of which kind {missing[0]} is. Fetch the model again.")
    return {name: kinds[name] for name in file.tensors}
