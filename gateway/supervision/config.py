"""Settings of the supervisor of local replicas. Times are seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CommandFor = Callable[[int, Path, int], list[str]]
"""(replica number from 0, path of the unix socket to serve on, threads to use) -> argv of the replica process."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """`replicas` processes share `cores` (None: the cores this process may use), each getting its own part.

    `startup_attempts`: deaths before it was ever ready after which a replica is given up. `fatal_exit_codes`: exits that
    trying again cannot mend. `healthy_period`: time up after which the restart back-off starts from `backoff_first` again.
    `stop_timeout`: from SIGTERM to SIGKILL. `runtime_dir`: where the private directory for the sockets is made (None: the
    system's directory for temporary files).
    """

    replicas: int = 1
    cores: tuple[int, ...] | None = None
    pin_cores: bool = True
    startup_attempts: int = 3
    fatal_exit_codes: tuple[int, ...] = (2, 126, 127)
    startup_timeout: float = 600.0
    probe_interval: float = 0.2
    backoff_first: float = 0.5
    backoff_max: float = 30.0
    healthy_period: float = 60.0
    stop_timeout: float = 15.0
    stderr_lines: int = 20
    runtime_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, not {self.replicas}")
        if self.startup_attempts < 1:
            raise ValueError(f"startup_attempts must be at least 1, not {self.startup_attempts}")
        if self.cores is not None and not self.cores:
            raise ValueError("cores must name at least one core; leave it out to use all of them")
        for name in ("startup_timeout", "probe_interval", "backoff_first", "backoff_max", "healthy_period", "stop_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"supervisor.{name} must be positive, not {getattr(self, name)}")
