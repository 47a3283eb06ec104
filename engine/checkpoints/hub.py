"""Models of the Hugging Face hub, kept in huggingface_hub's own cache layout under <cache>/hub."""

from __future__ import annotations

import re
from pathlib import Path

from engine.checkpoints.errors import CheckpointError

# What a checkpoint needs and nothing that a stranger could run.
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def hub_dir(cache_dir: Path) -> Path:
    return cache_dir / "hub"


def is_hub_id(name: str) -> bool:
    """True for `owner/name` and `owner/name@revision`."""
    return _ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def cached_snapshot(hub_id: str, cache_dir: Path) -> Path | None:
    """The directory of a hub model that was pulled before; None when it was not. Looks at the disk only."""
    repo, revision = _split(hub_id)
    folder = hub_dir(cache_dir) / f"models--{repo.replace('/', '--')}"
    reference = folder / "refs" / revision
    try:
        commit = reference.read_text().strip()
    except OSError:
        commit = revision
    snapshot = folder / "snapshots" / commit
    return snapshot if commit not in ("", ".", "..") and (snapshot / "config.json").is_file() else None


def pulled_snapshots(cache_dir: Path) -> list[tuple[str, Path]]:
    """(hub id, directory) of every hub model in the cache, by id."""
    found = []
    for folder in sorted(hub_dir(cache_dir).glob("models--*--*")):
        repo = "/".join(folder.name.split("--")[1:])
        references = {path.read_text().strip(): path.name for path in folder.glob("refs/*") if path.is_file()}
        for snapshot in sorted(folder.glob("snapshots/*")):
            if (snapshot / "config.json").is_file():
                name = references.get(snapshot.name, snapshot.name)
                found.append((repo if name == "main" else f"{repo}@{name}", snapshot))
    return found


def pull_from_hub(hub_id: str, cache_dir: Path) -> Path:
    """Downloads a model, or what is missing of it, and returns its directory. huggingface_hub draws its own progress bar.

    Raises CheckpointError when the hub cannot be reached, knows no such model, or does not give it out.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    repo, revision = _split(hub_id)
    try:
        return Path(hub.snapshot_download(repo, revision=revision, cache_dir=hub_dir(cache_dir), allow_patterns=PATTERNS))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is given out only to accounts it was granted to. Log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"The model hub knows no model {repo} (or it is private). Check the name.") from error
    except (errors.RevisionNotFoundError, errors.RevisionResolutionError) as error:
        raise CheckpointError(f"{repo} has no revision {revision}, or the hub cannot be reached to look it up.") from error
    except (OSError, errors.EntryNotFoundError) as error:
        raise CheckpointError(
            f"{repo} could not be pulled: the model hub cannot be reached or broke off ({_first_line(error)}). Check the "
            "network, or give the path of a local Hugging Face directory instead."
        ) from error


def _split(hub_id: str) -> tuple[str, str]:
    repo, _, revision = hub_id.partition("@")
    return repo, revision or "main"


def _first_line(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
