"""Workers named in a TOML file that is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.access.watched_file import WatchedFile
from gateway.discovery.fleet import Publish
from gateway.workers.spec import KINDS, WorkerSpec, make_spec

log = logging.getLogger(__name__)

_FIELDS = frozenset({"name", "url", "kind", "events", "replay", "topic", "model", "key_env", "concurrency"})
_MAX_BYTES = 4 * 2**20


class WorkersFileError(ValueError):
    """A file of workers that cannot be used. The message is a sentence that names what is wrong."""


class FileSource:
    """The workers of a file. One that is damaged, or away, changes nothing: those it had stay, and the log says why."""

    name = "file"
    kinds = frozenset(KINDS)

    def __init__(self, path: Path, environ: Mapping[str, str], *, poll_interval: float = 1.0) -> None:
        self._path = path
        self._environ = environ
        self._poll_interval = poll_interval

    async def run(self, publish: Publish) -> None:
        watched = WatchedFile(self._path)
        while True:
            if watched.changed():
                try:
                    workers = await asyncio.to_thread(read_workers, self._path, self._environ)
                except (WorkersFileError, OSError) as error:
                    log.error("workers are not read again: %s", error)
                else:
                    publish(workers)
            await asyncio.sleep(self._poll_interval)


def read_workers(path: Path, environ: Mapping[str, str]) -> dict[str, WorkerSpec]:
    """The [[worker]] tables of a file, by name (else by place). Raises WorkersFileError, OSError."""
    raw = path.read_bytes()
    if len(raw) > _MAX_BYTES:
        raise WorkersFileError(f"{path} is larger than {_MAX_BYTES} bytes.")
    try:
        parsed = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WorkersFileError(f"{path} is not TOML: {error}.") from error
    unknown = [key for key in parsed if key != "worker"]
    tables = parsed.get("worker", [])
    if unknown or not isinstance(tables, list):
        what = f"'{unknown[0]}' is not known" if unknown else "worker is no list"
        raise WorkersFileError(f"{path}: {what}; the file holds [[worker]] tables.")
    workers: dict[str, WorkerSpec] = {}
    for position, table in enumerate(tables):
        name, spec = _worker(path, position, table, environ)
        if name in workers:
            raise WorkersFileError(f"{path}: two workers are called '{name}'.")
        workers[name] = spec
    return workers


def _worker(path: Path, position: int, table: Any, environ: Mapping[str, str]) -> tuple[str, WorkerSpec]:
    where = f"{path}: worker {position + 1}"
    if not isinstance(table, dict):
        raise WorkersFileError(f"{where} is no table.")
    unknown = [key for key in table if key not in _FIELDS]
    if unknown:
        raise WorkersFileError(f"{where}: '{unknown[0]}' is not known; keys are {', '.join(sorted(_FIELDS))}.")
    for key, value in table.items():
        if not isinstance(value, int if key == "concurrency" else str) or isinstance(value, bool):
            raise WorkersFileError(f"{where}: {key} is {value!r}, which is of the wrong type.")
    if "url" not in table:
        raise WorkersFileError(f"{where} has no url.")
    options = {key.replace("_", "-"): value for key, value in table.items() if key not in ("name", "url", "kind")}
    try:
        spec = make_spec(table["url"], table.get("kind", "turnkeep"), options, environ)
    except ValueError as error:
        raise WorkersFileError(f"{where}: {error}.") from error
    return table.get("name", str(position)), spec
