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

    `startup_attempts`: deaths before it was ever healthy after which a replica is given up. `healthy_period`: time up
    after which the restart back-off starts from `backoff_first` again.
    """

    replicas: int = 1
    cores: tuple[int, ...] | None = None
    pin_cores: bool = True
    startup_attempts: int = 3
    startup_timeout: float = 600.0
    probe_interval: float = 0.2
    backoff_first: float = 0.5
    backoff_max: float = 30.0
    healthy_period: float = 60.0
    stop_timeout: float = 10.0
    stderr_lines: int = 20
    runtime_dir: Path | None = None
