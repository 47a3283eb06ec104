"""What lies where in the directory of the disk tier, and what in it may be removed.

    DIRECTORY/turnkeep-kv-2/KEY/data      the slots, one after the other
    DIRECTORY/turnkeep-kv-2/KEY/records   the index (offload.disk_records)
    DIRECTORY/turnkeep-kv-2/KEY/about     what it is, in JSON, for people and `turnkeep cache`

KEY names what makes blocks interchangeable: namespace and codec. The number is that of the format: what has another one is
never opened.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from offload.shared_locks import ByteLocks

logger = logging.getLogger(__name__)

FORMAT = 2
_PREFIX = "turnkeep-kv-"

_USERS = 1024


@dataclass(frozen=True, slots=True)
class About:
    """The description of a namespace: `format` must be FORMAT, `slot_bytes` is what one block takes, `max_bytes` the bound
    that it was last used with."""

    format: int
    key: str
    slot_bytes: int
    max_bytes: int = 0
    model: str = ""
    codec: str = ""


def root(directory: Path) -> Path:
    """Where this format keeps its namespaces."""
    return directory / f"{_PREFIX}{FORMAT}"


def foreign_formats(directory: Path) -> list[str]:
    """Names of what other versions have left in the directory."""
    try:
        names = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
    except OSError:
        return []
    return [name for name in names if name.startswith(_PREFIX) and name != f"{_PREFIX}{FORMAT}"]


def read_about(place: Path) -> About | None:
    """None when there is none that this version understands."""
    try:
        content = json.loads((place / "about").read_bytes())
        about = About(**{name: content[name] for name in ("format", "key", "slot_bytes", "max_bytes", "model", "codec")})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return about if about.format == FORMAT and about.key == place.name and isinstance(about.slot_bytes, int) else None


def write_about(place: Path, about: About) -> None:
    """Whole or not at all."""
    temporary = place / f"about.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(about), indent=1) + "\n")
    os.replace(temporary, place / "about")


class InUse:
    """Held by whoever uses a namespace, for as long as it lives."""

    def __init__(self, place: Path) -> None:
        """Raises OSError."""
        self._descriptor = os.open(place / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        locks = ByteLocks(self._descriptor)
        for number in range(_USERS):
            if locks.try_lock(number):
                break
        os.utime(place / "in-use")

    def close(self) -> None:
        """Lets go. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_in_use(place: Path) -> bool:
    """True when a process, alive, uses the namespace."""
    try:
        descriptor = os.open(place / "in-use", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not ByteLocks(descriptor).is_range_free(0, _USERS)
    finally:
        os.close(descriptor)


def namespaces(directory: Path) -> list[Path]:
    """The namespaces of this format, the one used longest ago first."""
    try:
        places = [entry for entry in root(directory).iterdir() if entry.is_dir()]
    except OSError:
        return []
    return sorted(places, key=last_use)


def last_use(place: Path) -> float:
    """When a namespace was last opened, seconds since 1970; 0 when nobody knows."""
    try:
        return (place / "in-use").stat().st_mtime
    except OSError:
        return 0.0


def used_on_disk(place: Path) -> int:
    """Bytes that a namespace takes of the file system."""
    total = 0
    for name in ("data", "records", "about", "in-use"):
        try:
            total += (place / name).stat().st_blocks * 512
        except OSError:
            continue
    return total


def remove(place: Path) -> bool:
    """Removes a namespace that nobody uses. False when somebody does, or it cannot be removed."""
    if is_in_use(place):
        return False
    try:
        shutil.rmtree(place)
    except OSError as error:
        logger.warning("%s cannot be removed: %s.", place, error.strerror or error)
        return False
    return True


def remove_abandoned(directory: Path, keep: Path, older_than: float) -> list[Path]:
    """Removes namespaces other than `keep` that nobody has opened for `older_than` seconds."""
    limit = time.time() - older_than
    removed = []
    for place in namespaces(directory):
        if place != keep and last_use(place) < limit and remove(place):
            logger.info("%s: nobody has used these blocks for %.0f days; they are gone.", place, older_than / 86400)
            removed.append(place)
    return removed
