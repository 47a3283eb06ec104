"""The grammar sources that were worth compiling once, kept for the next start: tool lists come back, compiled grammars do not.

A folder for each vocabulary, a file for each source, named by its digest; the file's time is when it was last used. Compiled
grammars themselves are not kept: those of large lists take a gigabyte when serialised.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class KnownLimits:
    """Of one folder: at most so many sources, of so many bytes altogether. `worth_milliseconds`: what compiles faster is not
    kept, nor what is shorter than `least_bytes`: patterns and single schemas, which hold more of a caller than of tools."""

    entries: int = 64
    bytes: int = 32 << 20
    worth_milliseconds: float = 20.0
    least_bytes: int = 1024


class KnownSources:
    """Sources of one vocabulary. Several processes may share the folder. One that cannot be read or written costs the time to
    compile again, and a line in the log."""

    def __init__(self, directory: Path, vocabulary: bytes, limits: KnownLimits = KnownLimits()) -> None:
        """`vocabulary`: whatever tells one vocabulary from another."""
        self.limits = limits
        self._directory = directory / hashlib.blake2b(vocabulary, digest_size=_DIGEST_BYTES).hexdigest()

    def all(self) -> Sequence[str]:
        """The sources, last used first."""
        found = []
        for path, _, _ in self._files():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                source = path.read_bytes()
                if path.name == _name(source):  # else it was damaged
                    found.append(source.decode())
        return found

    def compiled(self, source: str, milliseconds: float) -> None:
        """Keeps a source that took so long to compile, or notes that it was used again; what was used longest ago makes way."""
        if milliseconds < self.limits.worth_milliseconds:
            return
        encoded = source.encode("utf-8", "surrogatepass")
        if not self.limits.least_bytes <= len(encoded) <= self.limits.bytes:
            return
        path = self._directory / _name(encoded)
        try:
            if path.exists():
                os.utime(path)
                return
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=self._directory)  # readable by its owner only
            with os.fdopen(descriptor, "wb") as file:
                file.write(encoded)
            os.replace(temporary, path)
            self._make_way()
        except OSError as error:
            log.warning("a list of tools could not be kept in %s for the next start: %s", self._directory, error)

    def _make_way(self) -> None:
        total = 0
        for number, (path, size, _) in enumerate(self._files()):
            total += size
            if number >= self.limits.entries or total > self.limits.bytes:
                path.unlink(missing_ok=True)

    def _files(self) -> list[tuple[Path, int, float]]:
        """(path, bytes, when used), last used first."""
        found = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._directory):
                with contextlib.suppress(OSError):  # another process dropped it
                    stat = entry.stat()
                    found.append((Path(entry.path), stat.st_size, stat.st_mtime))
        return sorted(found, key=lambda each: each[2], reverse=True)


def _name(source: bytes) -> str:
    return hashlib.blake2b(source, digest_size=_DIGEST_BYTES).hexdigest()
