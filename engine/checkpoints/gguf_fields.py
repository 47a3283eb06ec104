"""Reading the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any, TypeVar

from gguf import GGUFReader

from engine.checkpoints.errors import CheckpointError

T = TypeVar("T")


def required_field(reader: GGUFReader, key: str, kind: type[T], source: str) -> T:
    """The value of `key`. Raises CheckpointError when it is missing or of another type."""
    field = reader.get_field(key)
    value = None if field is None else field.contents()
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind):
        raise CheckpointError(f"{source} lacks the metadata field {key}, or it is no {kind.__name__}; fetch the file again.")
    return value


def optional_field(reader: GGUFReader, key: str, default: Any) -> Any:
    """The value of `key`, else `default`."""
    field = reader.get_field(key)
    return default if field is None else field.contents()
