"""Entries of a key file: one key a line, as a hash, with what its holder may do.

    sha256:5e884898da28...  tenant=acme requests_per_minute=600 tokens_per_minute=2000000 priority=high admin

A key may stand there in clear as well; only its hash is kept in memory. Hashes are plain SHA-256, which is enough for keys that
were drawn at random (`turnkeep keys new`: 256 bits) and too little for words that somebody can guess.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

PriorityClass = Literal["high", "normal", "low"]
PRIORITY_CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)
"""The most urgent first."""

KEY_PREFIX = "tk-"
_HASHED = "sha256:"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_FILE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key. `digest`: of the key. `tenant`: several keys of one name share sessions (None: the key is its own tenant).
    Limits are per minute; None: the gateway's default, 0: none. `priority`: the most urgent class that its requests may ask
    for. `admin`: it may administer the gateway."""

    digest: bytes = field(repr=False)
    tenant: str | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    priority: PriorityClass = "normal"
    admin: bool = False


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key() -> str:
    """A key that cannot be guessed."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def checked_tenant(name: str) -> str:
    """The name of a tenant. Raises ValueError for one that cannot stand in a key file."""
    if not _NAME.fullmatch(name):
        raise ValueError("tenant must be 1 to 64 letters, digits, dots, dashes or underscores")
    return name


def parse_entry(text: str) -> KeyEntry:
    """One entry. Fields stand apart by spaces, after a hash also by commas. Raises ValueError with a sentence that repeats
    nothing of the key."""
    head, *rest = re.split(r"[\s,]+" if text.startswith(_HASHED) else r"\s+", text.strip())
    if head.startswith(_HASHED):
        if not _DIGEST.fullmatch(head.removeprefix(_HASHED)):
            raise ValueError("sha256: must be followed by 64 hexadecimal digits (`turnkeep keys hash` makes them)")
        digest = bytes.fromhex(head.removeprefix(_HASHED))
    elif head:
        digest = digest_of(head)
    else:
        raise ValueError("there is no key")
    entry = KeyEntry(digest)
    values: dict[str, object] = {}
    for word in filter(None, rest):
        name, _, value = word.partition("=")
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = _value(name, value, "=" in word)
    return KeyEntry(entry.digest, **values)  # type: ignore[arg-type]


def _value(name: str, value: str, assigned: bool) -> object:
    match name:
        case "admin":
            if assigned and value not in ("true", "false"):
                raise ValueError("admin stands alone, or is true or false")
            return value != "false"
        case "tenant":
            return checked_tenant(value)
        case "priority":
            if value not in PRIORITY_CLASSES:
                raise ValueError(f"priority must be one of {', '.join(PRIORITY_CLASSES)}")
            return value
        case "requests_per_minute" | "tokens_per_minute":
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not 0 <= number < math.inf:
                raise ValueError(f"{name} must be a number, zero (unlimited) or more")
            return number
    # Not repeated: somebody may have put a second key on the line.
    raise ValueError("after the key only tenant=, requests_per_minute=, tokens_per_minute=, priority= and admin may stand")


def format_entry(entry: KeyEntry) -> str:
    """The line of a key file."""
    parts = [_HASHED + entry.digest.hex()]
    if entry.tenant is not None:
        parts.append(f"tenant={entry.tenant}")
    for name in ("requests_per_minute", "tokens_per_minute"):
        value = getattr(entry, name)
        if value is not None:
            parts.append(f"{name}={value:.15g}")
    if entry.priority != "normal":
        parts.append(f"priority={entry.priority}")
    if entry.admin:
        parts.append("admin")
    return " ".join(parts)


def parse_entries(lines: Iterable[str], where: str) -> tuple[KeyEntry, ...]:
    """Entries of several lines; empty ones and those that begin with # are skipped. Raises ValueError that names the line."""
    entries: dict[bytes, int] = {}
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            entry = parse_entry(text)
        except ValueError as error:
            raise ValueError(f"{where}, line {number}: {error}") from error
        if entry.digest in entries:
            raise ValueError(f"{where}, line {number}: this key stands in line {entries[entry.digest]} already")
        entries[entry.digest] = number
        found.append(entry)
    return tuple(found)


def read_key_file(path: Path) -> tuple[KeyEntry, ...]:
    """The entries of a file. Raises ValueError with a sentence."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"the API key file {path} is larger than {_MAX_FILE_BYTES >> 20} MiB: no list of keys")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        # A decoding error would quote what it read.
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"the API key file {path} cannot be read: {why}") from None
    entries = parse_entries(lines, f"the API key file {path}")
    if not entries:
        raise ValueError(f"the API key file {path} holds no key; write one a line (`turnkeep keys new` makes them)")
    return entries
