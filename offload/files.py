"""The file operations of the disk tier, in one place: tests put a medium that fails in theirs."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from offload.checksum import Bytes, as_buffer

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_fallocate = getattr(ctypes.CDLL(None), "fallocate64", None)


class Files:
    """What the disk tier asks of the system. Everything may raise OSError."""

    def open(self, path: Path) -> int:
        """A file to read and write, made if it is not there."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read_into(self, descriptor: int, into: Bytes, offset: int) -> int:
        """Fills `into` from `offset` on; returns how many bytes there were, fewer only at the end of the file."""
        done = 0
        view = memoryview(as_buffer(into))
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def write(self, descriptor: int, payload: Bytes | bytes, offset: int) -> None:
        """Writes all of it."""
        view = memoryview(as_buffer(payload))
        done = 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], offset + done)

    def will_need(self, descriptor: int, offset: int, size: int) -> None:
        """Reads ahead."""
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def sync(self, descriptor: int) -> None:
        """Returns once what was written is on the medium."""
        os.fdatasync(descriptor)

    def punch(self, descriptor: int, offset: int, size: int) -> None:
        """Gives a range back to the file system (fallocate(2), FALLOC_FL_PUNCH_HOLE) where that can be done; else keeps it."""
        if _fallocate is not None:
            _fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(size))

    def free_bytes(self, path: Path) -> int:
        """What the file system has left for this user."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize
