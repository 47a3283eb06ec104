"""KV memory as bytes, for the tiers below it (offload.device)."""

from __future__ import annotations

import threading
from typing import Any

import torch

from engine.kv_layout import KVLayout
from offload.checksum import Bytes
from offload.codecs import BlockShape
from offload.device import DeviceBlocks


def block_shape(layout: KVLayout) -> BlockShape:
    """How many rows of how many elements a block has."""
    layers, sides, heads, tokens, width = layout.block_shape
    return BlockShape(layers * sides * heads * tokens, width, str(layout.dtype).removeprefix("torch."))


def device_blocks(kv: torch.Tensor) -> DeviceBlocks:
    """kv: [block, ...], contiguous."""
    return HostKV(kv) if kv.device.type == "cpu" else CudaKV(kv)


class HostKV:
    """KV memory of a CPU: its bytes are where the tiers can reach them."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._blocks: Any = kv.view(torch.uint8).view(kv.shape[0], -1).numpy()

    def source(self, block: int) -> Bytes:
        row: Bytes = self._blocks[block]
        return row

    def target(self, block: int) -> Bytes:
        return self.source(block)

    def filled(self, block: int) -> None:
        """It is there already."""


class CudaKV:
    """KV memory of an NVIDIA GPU: copied through one pinned block a thread, on a stream of that thread's own."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv.view(torch.uint8).view(kv.shape[0], -1)
        self._threads = threading.local()

    def source(self, block: int) -> Bytes:
        pinned, stream = self._own()
        with torch.cuda.stream(stream):
            pinned.copy_(self._kv[block], non_blocking=True)
        stream.synchronize()
        row: Bytes = pinned.numpy()
        return row

    def target(self, block: int) -> Bytes:
        row: Bytes = self._own()[0].numpy()
        return row

    def filled(self, block: int) -> None:
        pinned, stream = self._own()
        with torch.cuda.stream(stream):
            self._kv[block].copy_(pinned, non_blocking=True)
        stream.synchronize()

    def _own(self) -> tuple[torch.Tensor, Any]:
        own = self._threads
        if not hasattr(own, "pinned"):
            own.pinned = torch.empty(self._kv.shape[1], dtype=torch.uint8, pin_memory=True)
            own.stream = torch.cuda.Stream(self._kv.device)
        return own.pinned, own.stream
