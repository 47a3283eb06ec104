"""What was measured of this machine at one start and holds at the next: small JSON files in the cache directory.

A measurement is found by a digest of everything that it depends on. What of the engine's own code it depends on is not for
the caller to know: the digest covers all of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

_MAX_FILES = 256
_SOURCES = ("*.py", "*.h", "*.cpp")


class Measurements:
    """Integers by name and circumstances. A cache that cannot be read or written costs the time to measure again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, name: str, depends_on: Mapping[str, object]) -> int | None:
        """What `put` was given under the same circumstances, on this machine, by the same code; None when there is nothing."""
        try:
            value = json.loads(self._path(name, depends_on).read_bytes())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def put(self, name: str, depends_on: Mapping[str, object], value: int) -> None:
        """Keeps a value. `depends_on`: names to values whose repr tells them apart."""
        path = self._path(name, depends_on)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(descriptor, "w") as handle:
                json.dump(value, handle)
            os.replace(temporary, path)
            _drop_oldest(path.parent)
        except OSError:
            return

    def _path(self, name: str, depends_on: Mapping[str, object]) -> Path:
        digest = hashlib.sha256()
        for part in (_machine(), _code(), *(f"{key}={depends_on[key]!r}" for key in sorted(depends_on))):
            digest.update(part.encode() + b"\x00")
        return self._directory / f"{name}-{digest.hexdigest()[:24]}.json"


def _machine() -> str:
    """What of the processor decides which code runs, and how many cores there are."""
    return repr((torch.backends.cpu.get_cpu_capability(), sorted(torch.cpu.get_capabilities().items()), os.cpu_count()))


@functools.cache
def _code() -> str:
    """A digest of the engine's sources, and torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    root = Path(__file__).parent
    for path in sorted(path for pattern in _SOURCES for path in root.rglob(pattern)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\x00" + path.read_bytes() + b"\x00")
    return digest.hexdigest()


def _drop_oldest(directory: Path) -> None:
    files = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-_MAX_FILES]:
        path.unlink(missing_ok=True)
