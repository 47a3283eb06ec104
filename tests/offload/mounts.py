"""Real file systems that are small or read-only, where this machine lets tests mount some."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine lets nobody mount here ({done.stderr.strip() or done.returncode})")


@contextlib.contextmanager
def small_file_system(place: Path, size: str) -> Iterator[Path]:
    """A tmpfs of `size` (mount(8)) at `place`."""
    place.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
