"""The routers that are measured: their addresses, and what their processes use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil

_STAGE = re.compile(r'^turnkeep_gateway_stage_cpu_seconds_total\{stage="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Side:
    """`pid`: of the router's process on this machine; None leaves its processor time and memory unknown. `model`: what to ask
    for, None for the default. `own`: it tells what its stages take."""

    name: str
    url: str
    pid: int | None
    model: str | None = None
    own: bool = False

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far; 0 where it is unknown."""
        return 0.0 if self.pid is None else cpu_seconds(self.pid)

    def rss(self) -> int:
        """Resident bytes; 0 where they are unknown."""
        return 0 if self.pid is None else int(psutil.Process(self.pid).memory_info().rss)

    async def stages(self, client: aiohttp.ClientSession) -> Mapping[str, float]:
        """Seconds by stage so far; {} for others than this gateway."""
        if not self.own:
            return {}
        async with client.get(f"{self.url}/metrics") as response:
            return {name: float(value) for name, value in _STAGE.findall(await response.text())}


def cpu_seconds(pid: int) -> float:
    """To the nanosecond where the kernel counts so (the ticks of cpu_times are ten milliseconds)."""
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9
    except (OSError, ValueError, IndexError):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


def foreign_side(text: str) -> Side:
    """A side from `URL` or `NAME=URL`; its process is whoever listens there. Raises ValueError with a sentence."""
    name, equals, url = text.partition("=")
    if not equals:
        name, url = "", text
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is no router; write --vs http://host:port or --vs NAME=http://host:port")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    return Side(name or f"{parts.hostname}:{port}", url.rstrip("/"), _listener(port) if local else None)


def _listener(port: int) -> int | None:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return connection.pid
    return None
