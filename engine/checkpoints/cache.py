"""The model cache on disk: where models lie, and how one gets there whole or not at all.

    <cache>/models/NAME/        a converted model; turnkeep.json in it is its manifest
    <cache>/hub/                models of the hub, in huggingface_hub's own layout
    <cache>/fingerprints/       digests of weight files
    <cache>/locks/NAME.lock     held while NAME is being made

A model is built in a hidden directory beside its place and renamed into it, under the lock: two pulls at once do the work
once, and a pull that dies leaves nothing that could be taken for a model.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from engine.checkpoints.errors import CheckpointError

MANIFEST = "turnkeep.json"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a converted directory is, and what must lie in it: file name -> bytes. `recipe` counts the conversion's versions.

    blocks: the conversion kept the quantised blocks of its GGUF file, where that has any. Earlier ones did not, and what they
    made is still good for everything else.
    """

    name: str
    source: str
    recipe: int
    files: dict[str, int]
    blocks: bool = False


def default_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """`turnkeep` in the user's cache directory: XDG_CACHE_HOME when it is set to an absolute path, else ~/.cache.

    For the command line and for tests; everything else is handed the directory.
    """
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "turnkeep"


def models_dir(cache_dir: Path) -> Path:
    return cache_dir / "models"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a converted model; None where there is none that can be read."""
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def is_whole(directory: Path, manifest: Manifest) -> bool:
    """True when every file of the manifest is there at its full size."""
    try:
        return all((directory / name).stat().st_size == size for name, size in manifest.files.items())
    except OSError:
        return False


def write_manifest(directory: Path, *, name: str, source: str, recipe: int) -> None:
    """Lists what `directory` holds, after flushing it to the disk. Written last: a directory without it is no model."""
    files: dict[str, int] = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        files[path.name] = path.stat().st_size
    manifest = Manifest(name=name, source=source, recipe=recipe, files=files, blocks=True)
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


@contextlib.contextmanager
def locked(cache_dir: Path, name: str, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds the lock of one model. The kernel lets go of it when the process ends, however it ends."""
    path = cache_dir / "locks" / f"{name}.lock"
    with speaking_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new directory beside `target` that takes its place when the block ends well, and is gone when it does not.

    To be called under the lock of `target`'s name: what earlier attempts left behind is then nobody's and is removed.
    """
    prefix = f".{target.name}."
    with speaking_of(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(prefix + "*"):
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        content = staging / "new"
        content.mkdir()
        with speaking_of(target):
            yield content
            if target.exists():
                target.rename(staging / "old")
            content.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def speaking_of(path: Path) -> Iterator[None]:
    """Turns an operating system error of the block into a sentence about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"There is no space left for {path}. Free some, or choose another place with --cache-dir."
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = f"{path} cannot be written ({error.strerror}). Choose a directory of your own with --cache-dir."
        else:
            text = f"{path} cannot be made: {error.strerror or error}."
        raise CheckpointError(text) from error


def require_space(directory: Path, needed: int) -> None:
    """Raises CheckpointError when the file system of `directory` has less than `needed` bytes left."""
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(
            f"Making the model takes {needed / 1e6:.0f} MB in {directory}, and {free / 1e6:.0f} MB are free there. "
            "Free some space, or choose another place with --cache-dir."
        )
