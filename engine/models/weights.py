"""Weights out of safetensors shards, mapped into memory and copied once, straight to where the decoder wants them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.progress import Report, silent
from engine.checkpoints.weight_files import TensorEntry, WeightFile

LOADING = "Loading"
_FLOATS = ("BF16", "F16", "F32", "F64")
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16}
# Buffers that old versions of transformers saved and that are computed here.
_COMPUTED = (".rotary_emb.inv_freq", ".masked_bias")


class Weights:
    """The tensors of one checkpoint, each to be taken once by name and shape. Close it when the decoder is built.

    Every method raises CheckpointError when a tensor is missing or has another shape or type than the configuration implies.
    """

    def __init__(
        self, directory: Path, files: Sequence[WeightFile], *, dtype: torch.dtype, device: torch.device, report: Report = silent
    ) -> None:
        self.directory = directory
        self.dtype = dtype
        self.device = device
        self._report = report
        self._entries: dict[str, TensorEntry] = {}
        self._file_of: dict[str, WeightFile] = {}
        self._handles: dict[Path, Any] = {}
        self._taken: set[str] = set()
        self._done = 0
        for file in files:
            for name, entry in file.tensors.items():
                if name in self._file_of:
                    raise CheckpointError(
                        f"{directory}: {name} lies in both {self._file_of[name].path.name} and {file.path.name}."
                    )
                self._entries[name], self._file_of[name] = entry, file
        self._total = sum(entry.elements for entry in self._entries.values()) * dtype.itemsize

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy of one tensor in this load's dtype and device."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._copy(name, tensor)
        return tensor

    def take_rows(
        self, parts: Iterable[tuple[str, int]], columns: int | None, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Several tensors as one, stacked along their first dimension: (name, rows) each. `columns` None: vectors.

        dtype: None is that of this load.
        """
        parts = list(parts)
        rows = sum(count for _, count in parts)
        shape = (rows,) if columns is None else (rows, columns)
        fused = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        start = 0
        for name, count in parts:
            self._copy(name, fused[start : start + count])
            start += count
        return fused

    def stored_dtype(self, names: Iterable[str]) -> torch.dtype:
        """What holds these tensors as they are stored (float64 aside): float32 unless all are of one half-precision type."""
        kinds = {_TORCH.get(self._entry(name).dtype, torch.float32) for name in names}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def same(self, first: str, second: str) -> bool:
        """True when two tensors hold equal values."""
        a, b = self._read(first), self._read(second)
        return a.shape == b.shape and torch.equal(a, b)

    def ignore(self, name: str) -> None:
        """Marks a tensor as known and not needed."""
        self._taken.add(name)

    def check_nothing_left(self, architecture: str) -> None:
        """Raises CheckpointError when the files hold tensors that nobody took: the model is then another than it says."""
        left = sorted(name for name in self._entries if name not in self._taken and not name.endswith(_COMPUTED))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"{self.directory} holds tensors that a {architecture} with this config.json does not have: "
                f"{', '.join(left[:3])}{more}. Check that config.json and the weights belong together."
            )

    def close(self) -> None:
        """Unmaps the files."""
        self._handles.clear()

    def _copy(self, name: str, target: torch.Tensor) -> None:
        source = self._read(name)
        if tuple(source.shape) != tuple(target.shape):
            raise CheckpointError(
                f"{self._file_of[name].path}: {name} has the shape {list(source.shape)}, but config.json implies "
                f"{list(target.shape)}. Check that config.json and the weights belong together."
            )
        target.copy_(source)
        self._taken.add(name)
        self._done += target.numel() * self.dtype.itemsize
        self._report(LOADING, self._done, self._total)

    def _read(self, name: str) -> torch.Tensor:
        """The tensor as it lies in the mapped file; no bytes are copied."""
        entry = self._entry(name)
        path = self._file_of[name].path
        if entry.dtype not in _FLOATS:
            raise CheckpointError(f"{path}: {name} is stored as {entry.dtype}; those that load: {', '.join(_FLOATS)}.")
        try:
            handle = self._handles.get(path)
            if handle is None:
                handle = self._handles[path] = safe_open(str(path), framework="pt", device="cpu")
            return handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}). Fetch the model again.") from error

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.directory} lacks the tensor {name}, which its config.json calls for. Fetch the model again, or check "
                "that config.json and the weights belong together."
            )
        return entry
