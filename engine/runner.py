"""The KV memory, and the forward pass over it. Knows tensors and blocks, not requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engine.config import KVDTypeName
from engine.decode_graphs import DecodeGraphs
from engine.forward import Forward
from engine.kernels.interface import StepBatch
from engine.kv_cache import BlockCopy
from engine.kv_layout import KVLayout
from engine.models.registry import LoadedModel


def allocate_kv(model: LoadedModel, num_blocks: int, block_size: int, kv_dtype: KVDTypeName = "auto") -> torch.Tensor:
    """KV memory of a model, [block][layer][k, v][kv head][token][dim], as `KVLayout` says; raises ValueError as that does."""
    return KVLayout.of(model, block_size, kv_dtype).allocate(num_blocks)


class Runner:
    """One model and its KV memory."""

    def __init__(self, forward: Forward, kv: torch.Tensor, graphs: DecodeGraphs | None = None) -> None:
        """kv: as `allocate_kv` makes it. graphs: of this pass over this memory; None: every step runs eagerly."""
        self._forward = forward
        self._kv = kv
        self._graphs = graphs
        self.forward_seconds = 0.0
        """Time spent in the forward pass so far."""

    @property
    def device(self) -> torch.device:
        """Where batches are expected."""
        return self._kv.device

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures the decode graphs, where there are any to be. No block that a sequence may hold is touched."""
        if self._graphs is not None:
            self._graphs.capture()

    @torch.inference_mode()
    def run(self, batch: StepBatch, rows: Sequence[int], copies: Sequence[BlockCopy] = ()) -> torch.Tensor:
        """Computes a batch after making the copies. Returns the logits that follow the tokens in `rows` of the batch,
        float32 [len(rows), vocabulary]; they hold until the next run."""
        if copies:
            self._copy(copies)
        began = time.perf_counter()
        size = None if self._graphs is None else self._graphs.size_for(batch, rows)
        if self._graphs is None or size is None:
            logits = self._forward.run(batch, self._kv, rows)
        else:
            logits = self._graphs.run(batch, size)
        self.forward_seconds += time.perf_counter() - began
        return logits

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        # All sources are read before anything is written: a source freed in this step's plan may be a destination too.
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._kv.device)
        self._kv[pairs[:, 1]] = self._kv[pairs[:, 0]]
