"""Settings of keys and of who may administer the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """`keys`: entries as a key file has them (gateway.access.entries). `key_file`: more of them, read again when it changes.
    With neither, everybody may come in, and only callers on this machine may administer.

    `admin_port`: administration gets a port of its own on `admin_host`, where no key is asked for; None: none, 0: a free one.
    `open_metrics`: /metrics is for everybody, also where there are keys. `requests_per_minute`, `tokens_per_minute`: of a key
    whose entry sets none; 0: unlimited.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    key_file: Path | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    open_metrics: bool = False
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0

    def __post_init__(self) -> None:
        if self.admin_port is not None and not 0 <= self.admin_port <= 65535:
            raise ValueError(f"auth.admin_port must lie between 0 and 65535, not {self.admin_port}")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"auth.{name} must be zero (unlimited) or more, not {getattr(self, name)}")

    @property
    def restricted(self) -> bool:
        """Whether requests need a key."""
        return bool(self.keys) or self.key_file is not None
