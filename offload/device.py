"""What the tiers need of the device's KV memory."""

from __future__ import annotations

from typing import Protocol

from offload.checksum import Bytes


class DeviceBlocks(Protocol):
    """The blocks of KV memory as bytes. Called from transfer threads, while the engine computes.

    On a CPU both give views of KV memory itself. Where the device has a memory of its own they give pinned memory, which
    `source` has been copied into and `filled` copies from, on a stream beside the one that computes.
    """

    def source(self, block: int) -> Bytes:
        """A block's bytes, to be read before the next call of this thread."""

    def target(self, block: int) -> Bytes:
        """Where a block's bytes are to be written, before `filled`."""

    def filled(self, block: int) -> None:
        """What `target` gave was written: when this returns, the device has it."""
