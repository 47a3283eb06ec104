"""A GGUF file of the user's as a model: converted once into the cache, under the digest of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.checkpoints.cache import is_whole, locked, models_dir, read_manifest, require_space, staged, write_manifest
from engine.checkpoints.fingerprint import file_digest
from engine.checkpoints.gguf_llama import convert_llama
from engine.checkpoints.progress import Report, silent

SUFFIX = ".gguf"
RECIPE = 1
"""Counts changes of what a conversion writes; a model of an older recipe is made anew."""


def is_gguf_file(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX and path.is_file()


def converted(file: Path, cache_dir: Path, *, report: Report = silent) -> Path | None:
    """The directory that this file was converted into, when it is there and whole. Raises CheckpointError: see `convert`."""
    directory, source = _place(file, cache_dir, report)
    return directory if _is_current(directory, source) else None


def convert(file: Path, cache_dir: Path, *, report: Report = silent, on_wait: Callable[[], None] | None = None) -> Path:
    """Converts a GGUF file, unless that has been done, and returns the directory. The file stays where it is.

    Raises CheckpointError when the file cannot be read or converted (only Llama models with a known tokenizer can), and when
    there is no space.
    """
    directory, source = _place(file, cache_dir, report)
    if _is_current(directory, source):
        return directory
    with locked(cache_dir, directory.name, on_wait=on_wait):
        if not _is_current(directory, source):
            require_space(cache_dir, 2 * file.stat().st_size)  # at the very least: blocks and weights
            with staged(directory) as staging:
                convert_llama(file, staging, report=report)
                write_manifest(staging, name=directory.name, source=source, recipe=RECIPE)
    return directory


def _place(file: Path, cache_dir: Path, report: Report) -> tuple[Path, str]:
    digest = file_digest(file, cache_dir, report=report)
    return models_dir(cache_dir) / f"{file.stem}-{digest[:12]}", f"GGUF file, xxh3-128 {digest}"


def _is_current(directory: Path, source: str) -> bool:
    manifest = read_manifest(directory)
    return manifest is not None and manifest.recipe == RECIPE and manifest.source == source and is_whole(directory, manifest)
