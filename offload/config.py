"""Which tiers there are, and how large."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offload.arena import SHARED_MEMORY
from offload.codecs import CODECS, CodecName

REMOTE_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Settings of the tiers of one engine.

    host_bytes: of shared memory, for all replicas of this machine and model together; 0 for none. disk: a directory, for all of
    them too; None for none. disk_bytes: what this model's blocks may take there. disk_min_free: bytes that are left free on its
    file system. codec: how blocks are kept below the device. compress: zstd on what is written to disk. remote: a Redis, as
    redis://HOST:PORT/DB; None for none. remote_bytes: what this model's blocks may take there. load: what is known is loaded
    where that is faster than computing it, by what both were measured to take, or always. shared_memory: where the memory that
    replicas share has its names.
    """

    host_bytes: int = 0
    disk: Path | None = None
    disk_bytes: int = 8 << 30
    disk_min_free: int = 1 << 30
    codec: CodecName = "raw"
    compress: bool = False
    remote: str | None = None
    remote_bytes: int = 1 << 30
    load: Literal["faster", "always"] = "faster"
    shared_memory: Path = SHARED_MEMORY

    def __post_init__(self) -> None:
        """Raises ValueError, with a sentence."""
        for name in ("host_bytes", "disk_bytes", "disk_min_free", "remote_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more.")
        if self.remote is not None and not self.remote.startswith(REMOTE_SCHEMES):
            raise ValueError(
                f"remote is {self.remote.partition('@')[2] or self.remote!r}; write redis://HOST:PORT/DB, rediss://... or unix://PATH."
            )
        if self.codec not in CODECS:
            raise ValueError(f"codec is {self.codec!r}; it must be one of {', '.join(CODECS)}.")

    @property
    def is_on(self) -> bool:
        """True when there is a tier at all."""
        return self.host_bytes > 0 or self.disk is not None or self.remote is not None
