"""What a checkpoint's weights are: a digest over every byte of them, so that two files of one name never share KV.

Reading gigabytes at every start would be slow, so a file's digest is kept in a sidecar in the cache, found by device, inode,
size and times of modification and change. A name or a path is never trusted.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import msgspec
import xxhash

from engine.checkpoints.cache import speaking_of
from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.progress import Report, silent

HASHING = "Hashing"
_CHUNK = 8 << 20
_MAX_SIDECARS = 4096
# A file changed this recently could change again without its times telling.
_SETTLED_NS = 2_000_000_000


class Stamp(msgspec.Struct, frozen=True):
    """What tells that a file is the one it was, and unchanged."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Sidecar(msgspec.Struct, frozen=True):
    """What is remembered of one file."""

    digest: str
    stamp: Stamp


def stamp_of(path: Path) -> Stamp:
    """Raises CheckpointError when the file cannot be looked at."""
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    return Stamp(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def file_digest(path: Path, cache_dir: Path | None, *, report: Report = silent) -> str:
    """xxh3-128 of a file's bytes, in hex; from the sidecar when the file is unchanged. `cache_dir` None: always read.

    Raises CheckpointError when the file cannot be read, or changes meanwhile.
    """
    stamp = stamp_of(path)
    sidecar = None if cache_dir is None else _sidecar_path(cache_dir, stamp)
    known = None if sidecar is None else _read_sidecar(sidecar)
    if known is not None and known.stamp == stamp:
        return known.digest
    try:
        digest = _hash(path, stamp.size, report)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    check_unchanged(path, stamp)
    if sidecar is not None and time.time_ns() - max(stamp.mtime_ns, stamp.ctime_ns) > _SETTLED_NS:
        _write_sidecar(sidecar, Sidecar(digest, stamp))
    return digest


def check_unchanged(path: Path, stamp: Stamp) -> None:
    """Raises CheckpointError when the file is no longer what `stamp` was taken of."""
    if stamp_of(path) != stamp:
        raise CheckpointError(f"{path} changed while it was read. Start again when it is complete.")


def weights_fingerprint(paths: list[Path], settings: bytes, cache_dir: Path | None, *, report: Report = silent) -> str:
    """Hex digest over the files' bytes, in the order given, and over `settings`. The same on every process and machine."""
    digest = xxhash.xxh3_128(b"turnkeep-weights-v1\x00")
    for path in paths:
        digest.update(bytes.fromhex(file_digest(path, cache_dir, report=report)))
    digest.update(settings)
    return digest.hexdigest()


def _hash(path: Path, size: int, report: Report) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    done = 0
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            report(HASHING, done, size)
    return digest.hexdigest()


def _sidecar_path(cache_dir: Path, stamp: Stamp) -> Path:
    return cache_dir / "fingerprints" / f"{stamp.device:x}-{stamp.inode:x}.json"


def _read_sidecar(path: Path) -> Sidecar | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Sidecar)
    except (OSError, msgspec.DecodeError):
        return None


def _write_sidecar(path: Path, entry: Sidecar) -> None:
    """Best effort: a cache that cannot be written costs the next start a read of the weights."""
    try:
        with speaking_of(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(msgspec.json.encode(entry))
            os.replace(temporary, path)
            _drop_oldest(path.parent)
    except CheckpointError:
        return


def _drop_oldest(directory: Path) -> None:
    files = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-_MAX_SIDECARS]:
        path.unlink(missing_ok=True)
