"""Where workers are found, as options say it."""

from __future__ import annotations

from pathlib import Path

from cli.config import ConfigError
from cli.serving import DiscoveryOptions
from gateway.discovery.file import FileSource, WorkersFileError, read_workers
from gateway.discovery.fleet import WorkerSource
from gateway.discovery.parse import parse_workers
from gateway.workers.spec import WorkerSpec


def found_workers(options: DiscoveryOptions) -> tuple[tuple[WorkerSpec, ...], tuple[WorkerSource, ...]]:
    """Those that are named, and where more are to be found. Raises ConfigError."""
    try:
        parsed = [parse_workers(text, options.environment) for text in options.worker]
    except ValueError as error:
        raise ConfigError(f"--worker: {error}.") from error
    workers = tuple(each for each in parsed if isinstance(each, WorkerSpec))
    sources: list[WorkerSource] = [each for each in parsed if not isinstance(each, WorkerSpec)]
    if options.workers_file is not None:
        path = Path(options.workers_file)
        try:
            read_workers(path, options.environment)
        except OSError as error:
            raise ConfigError(f"--workers-file: {path} cannot be read: {error.strerror}") from error
        except WorkersFileError as error:
            raise ConfigError(f"--workers-file: {error}") from error
        sources.append(FileSource(path.absolute(), options.environment))
    return workers, tuple(sources)
