"""How much memory this process may still take, and how much it took at most meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_SELF = Path("/proc/self")


def available_memory(cgroup_root: Path = CGROUP_ROOT, proc_self: Path = PROC_SELF) -> int:
    """Bytes that can be taken without swapping or being killed: what the machine has left, or less where a control group of
    this process or of one of its parents leaves less (containers)."""
    left = [int(psutil.virtual_memory().available)]
    left.extend(_cgroup_headrooms(cgroup_root, proc_self))
    return max(0, min(left))


def _cgroup_headrooms(root: Path, proc_self: Path) -> Iterator[int]:
    try:
        lines = (proc_self / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from _walk(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _walk(root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _walk(base: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> Iterator[int]:
    """What each group from `path` up to `base` leaves. Inside a container the own group is often mounted at the root and the
    path names directories that are not there; those are passed over."""
    relative = Path(path.lstrip("/"))
    for directory in (base / relative, *(base / parent for parent in relative.parents)):
        limit, usage = _number(directory / limit_name), _number(directory / usage_name)
        if limit is None or usage is None or limit >= 1 << 60:
            continue
        yield limit - usage + _statistic(directory / "memory.stat", reclaimable)


def _number(file: Path) -> int | None:
    """None when the file is not there or says `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    """Bytes of the page cache that the kernel drops before it refuses memory; they count as used in the group's books."""
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        return 0
    return 0


def peak_growth(work: Callable[[], None]) -> int:
    """Runs `work`; bytes by which this process' resident memory exceeded what it was before, at most.

    Garbage is collected first: what happened to be freed meanwhile would hide what `work` takes.

    Linux keeps the exact peak and lets a process reset it (proc(5), clear_refs); elsewhere it is sampled every millisecond.
    """
    gc.collect()
    process = psutil.Process()
    before = int(process.memory_info().rss)
    try:
        (PROC_SELF / "clear_refs").write_text("5")
    except OSError:
        return max(0, _sampled_peak(process, work) - before)
    work()
    return max(0, _high_water_mark() - before)


def _high_water_mark() -> int:
    for line in (PROC_SELF / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _sampled_peak(process: psutil.Process, work: Callable[[], None]) -> int:
    done = threading.Event()
    peak = 0

    def sample() -> None:
        nonlocal peak
        while True:
            peak = max(peak, int(process.memory_info().rss))
            if done.wait(0.001):
                return

    sampler = threading.Thread(target=sample, name="memory-sampler", daemon=True)
    sampler.start()
    try:
        work()
    finally:
        done.set()
        sampler.join()
    return peak
