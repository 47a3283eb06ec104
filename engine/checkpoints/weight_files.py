"""The safetensors files of a checkpoint, and what their headers promise. Reads headers only, and needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from engine.checkpoints.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header. `dtype` as safetensors writes it: BF16, F16, F32."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file that is as long as its header says."""

    path: Path
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str] = field(default_factory=dict)


def read_weight_files(directory: Path) -> tuple[WeightFile, ...]:
    """Every weight file of a checkpoint with its header, by name.

    Raises CheckpointError when one is missing, shorter than its header says, or when the index names tensors that are not in
    their file.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return (read_weight_file(single),)
    if not index.is_file():
        other = next((path.name for path in sorted(directory.glob("*.bin"))), None)
        hint = (
            f" It has {other}, which is not read: convert it with `save_pretrained(..., safe_serialization=True)`."
            if other
            else ""
        )
        raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}; fetch the model again.{hint}")
    weight_map = _read_index(index)
    files = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}, which lies elsewhere; fetch the model again.")
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {INDEX} names it. Fetch the model again.")
        file = read_weight_file(path)
        for tensor, shard in weight_map.items():
            if shard == name and tensor not in file.tensors:
                raise CheckpointError(
                    f"{path} does not hold the tensor {tensor}, though {INDEX} says so. Fetch the model again."
                )
        files.append(file)
    return tuple(files)


def read_weight_file(path: Path) -> WeightFile:
    """Reads one file's header. Raises CheckpointError when it cannot be, or when the file's length is not what it promises."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER):
                raise CheckpointError(f"{path} is truncated or no safetensors file ({size} bytes). Fetch the model again.")
            raw = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: TensorEntry(str(entry["dtype"]), tuple(map(int, entry["shape"]))) for name, entry in entries.items()}
        metadata = {str(key): str(value) for key, value in (header.get("__metadata__") or {}).items()}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header. Fetch the model again.") from error
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        kind = "truncated" if size < expected else "longer than it should be"
        raise CheckpointError(f"{path} is {kind}: its header promises {expected} bytes, it has {size}. Fetch the model again.")
    return WeightFile(path, tensors, metadata)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as an index of shards ({error!r}). Fetch the model again.") from error
