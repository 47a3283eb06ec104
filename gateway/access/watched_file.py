"""A file that is read again when it changes."""

from __future__ import annotations

from pathlib import Path


class WatchedFile:
    """Knows a file by inode, size and time of change, which also tells when it was replaced (as editors and Kubernetes do)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self.missed = 0
        """Looks in a row at which it was not there."""

    def changed(self) -> bool:
        """Whether it is another than at the last call. A file that is away for a moment has not changed."""
        try:
            stat = self.path.stat()
        except OSError:
            self.missed += 1
            return False
        self.missed = 0
        seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        changed, self._seen = seen != self._seen, seen
        return changed
