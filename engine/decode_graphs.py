"""Decode steps as captured graphs: one launch a step instead of several a layer.

A graph is a fixed sequence of launches over fixed memory. So there is one for each of a few batch sizes, over one set of input
buffers; a step is copied into the buffers, padded to the next size, and replayed. What pads a batch are sequences of one token
whose KV goes into a block that belongs to no sequence, whatever the pool does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from engine.forward import Forward
from engine.kernels.interface import StepBatch

logger = logging.getLogger(__name__)


class Graph(Protocol):
    """A captured piece of work. `output`: where every replay leaves its result."""

    output: torch.Tensor

    def replay(self) -> None:
        """Does the work again, with what the tensors it read hold now."""


class GraphCapture(Protocol):
    """Makes graphs of one device; all of them share their memory, so only the last replay's output holds."""

    def capture(self, work: Callable[[], torch.Tensor]) -> Graph:
        """Runs `work`, once or more, and keeps what it launched. Nothing in it may wait for the device."""


class DecodeGraphs:
    """Graphs of a forward pass over one KV memory. Not thread-safe.

    kv: [block][layer][k, v][kv head][token][dim]; its last block is the padding's own. sizes: batch sizes, ascending.
    max_model_len: tokens that a context may have; a longer one is not taken.
    """

    def __init__(
        self, forward: Forward, kv: torch.Tensor, capture: GraphCapture, sizes: Sequence[int], max_model_len: int
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._capture = capture
        self._sizes = tuple(sizes)
        self._max_model_len = max_model_len
        self._block_size = kv.shape[4]
        self._padding_block = kv.shape[0] - 1
        self._graphs: dict[int, Graph] = {}
        most, device = self._sizes[-1], kv.device
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._context_lens = torch.ones(most, dtype=torch.int32, device=device)
        width = -(-max_model_len // self._block_size)
        self._block_tables = torch.zeros((most, width), dtype=torch.int32, device=device)
        self._query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._pad(0, most)

    def capture(self) -> None:
        """Captures all sizes, the largest first: the others fit into the memory it took. Writes to the padding's block only."""
        began = time.monotonic()
        logger.info("Capturing decode graphs for batch sizes %s.", ", ".join(map(str, self._sizes)))
        for done, size in enumerate(reversed(self._sizes), 1):
            batch = self._batch(size)
            self._graphs[size] = self._capture.capture(partial(self._forward.run, batch, self._kv, range(size)))
            logger.debug("Captured the decode graph of batch size %d (%d of %d).", size, done, len(self._sizes))
        logger.info("Captured %d decode graphs in %.2f s.", len(self._sizes), time.monotonic() - began)

    def size_for(self, batch: StepBatch, rows: Sequence[int]) -> int | None:
        """The captured batch size that takes this step; None where it must run eagerly: a prefill is in it, not every row's
        logits are wanted, or no captured size is large enough."""
        count = batch.num_sequences
        if batch.num_tokens != count or list(rows) != list(range(count)) or max(batch.context_lens_list) > self._max_model_len:
            return None
        return next((size for size in self._sizes if size >= count and size in self._graphs), None)

    def run(self, batch: StepBatch, size: int) -> torch.Tensor:
        """Logits of a step for which `size_for` gave `size`, float32 [sequences, vocabulary]. They hold until the next run."""
        count, width = batch.block_tables.shape
        self._token_ids[:count] = batch.token_ids
        self._positions[:count] = batch.positions
        self._slots[:count] = batch.slots
        self._context_lens[:count] = batch.context_lens
        self._block_tables[:count, :width] = batch.block_tables
        if count < size:
            self._pad(count, size)
        graph = self._graphs[size]
        graph.replay()
        return graph.output[:count]

    def _pad(self, start: int, stop: int) -> None:
        self._token_ids[start:stop] = 0
        self._positions[start:stop] = 0
        self._slots[start:stop] = self._padding_block * self._block_size
        self._context_lens[start:stop] = 1
        self._block_tables[start:stop, 0] = self._padding_block

    def _batch(self, size: int) -> StepBatch:
        """The buffers' first `size` rows. The lists bound what a replay may find in the tensors: kernels size their grids by
        them."""
        return StepBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_start=self._query_start[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size],
            query_start_list=tuple(range(size + 1)),
            context_lens_list=(self._max_model_len,) * size,
        )
