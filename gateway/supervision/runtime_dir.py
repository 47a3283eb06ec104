"""A private directory for sockets that outlives neither a clean end nor, for long, a violent one."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

_PREFIX = "turnkeep-run-"
_LOCK = "lock"
# sun_path holds 108 bytes on Linux, 104 on macOS, a NUL among them.
_MAX_SOCKET_PATH = 103
_LONGEST_NAME = len("/replica-9999-999999.sock")


class RuntimeDir:
    """Made on construction, readable by this user only; `close` removes it.

    A lock is held on it for as long as this process lives. Directories of dead processes, which is what `kill -9` leaves
    behind, are recognised by their free lock and removed.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Raises ValueError when `parent` is no directory to write in, or so long that no socket fits below it."""
        root = _default_parent() if parent is None else parent.absolute()
        _remove_stale(root)
        while True:
            try:
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            except OSError as error:
                raise ValueError(f"no directory for sockets can be made in {root}: {error.strerror}") from error
            self._lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (path / _LOCK).exists():
                    break
            except BlockingIOError:
                pass
            os.close(self._lock)  # Another start took it for a stale one in the instant before it was locked.
        self.path = path
        if len(os.fsencode(path)) + _LONGEST_NAME > _MAX_SOCKET_PATH:
            self.close()
            raise ValueError(f"the path {root} is too long for unix sockets; choose a shorter runtime directory")

    def close(self) -> None:
        """Removes the directory and all in it; idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _default_parent() -> Path:
    """The system's directory for temporary files; where its path is too long, the one that is always there."""
    usual = Path(tempfile.gettempdir())
    fits = len(os.fsencode(usual)) + len("/") + len(_PREFIX) + 8 + _LONGEST_NAME <= _MAX_SOCKET_PATH
    return usual if fits else Path("/tmp")


def _remove_stale(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed %s, left behind by a process that was killed", path)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
