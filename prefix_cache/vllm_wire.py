"""KV events as vLLM publishes them over ZMQ (vllm/distributed/kv_events.py), and SGLang after it: MessagePack both ways.

A batch is [timestamp, events, data-parallel rank]. Events are maps with a "type", or, in older versions and in SGLang, arrays
with the type first; both are read, maps are written. Numbers of batches travel beside them, as 8 bytes big-endian from 0 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

ForeignHash = bytes | int
"""A block's name at its worker; opaque."""

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Stands where the number of a batch would, after the last batch of a replay."""

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys")
_REMOVED = ("block_hashes", "medium")


@dataclass(frozen=True, slots=True)
class ForeignStored:
    """Blocks that can now be found: `hashes` in chain order after `parent`, `token_ids` of all of them. `salt`: of the first
    block.

    `plain` False: something beside tokens, adapter and salt goes into the blocks (images), so that tokens do not name them.
    """

    hashes: tuple[ForeignHash, ...]
    parent: ForeignHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    salt: str | None = None
    plain: bool = True
    group: int | None = None


@dataclass(frozen=True, slots=True)
class ForeignRemoved:
    """Blocks that can no longer be found in `medium`."""

    hashes: tuple[ForeignHash, ...]
    medium: str | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class ForeignCleared:
    """Everything is gone."""


ForeignEvent = ForeignStored | ForeignRemoved | ForeignCleared


def decode_batch(payload: bytes) -> list[ForeignEvent]:
    """The events of a batch; those of unknown types are left out. Raises ValueError for what is no such batch."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not MessagePack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("not a batch of events: an array of time and events is expected")
    events = []
    for raw in batch[1]:
        event = _event(raw)
        if event is not None:
            events.append(event)
    return events


def encode_batch(at: float, events: Iterable[ForeignEvent]) -> bytes:
    """A batch as vLLM writes it. `at`: seconds since the epoch."""
    return msgspec.msgpack.encode([at, [_as_map(event) for event in events], 0])


def _event(raw: Any) -> ForeignEvent | None:
    if isinstance(raw, dict):
        kind, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        fields = dict(zip(_STORED if kind == "BlockStored" else _REMOVED, raw[1:], strict=False))
    else:
        raise ValueError("an event is neither map nor array")
    if kind == "AllBlocksCleared":
        return ForeignCleared()
    if kind == "BlockRemoved":
        return ForeignRemoved(_hashes(fields.get("block_hashes")), _text(fields.get("medium")), _whole(fields.get("group_idx")))
    if kind != "BlockStored":
        return None
    hashes, tokens, size = _hashes(fields.get("block_hashes")), fields.get("token_ids"), fields.get("block_size")
    parent, lora = fields.get("parent_block_hash"), _text(fields.get("lora_name"))
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
        raise ValueError("token_ids of a BlockStored are no token ids")
    if type(size) is not int or size < 1:
        raise ValueError(f"block_size of a BlockStored is {size!r}")
    if parent is not None and not isinstance(parent, bytes | int):
        raise ValueError("parent_block_hash of a BlockStored is no hash")
    if lora is None and fields.get("lora_id") is not None:
        lora = f"lora-{fields['lora_id']}"
    salt, plain = _extra(fields.get("extra_keys"), lora)
    return ForeignStored(
        hashes, parent, tuple(tokens), size, _text(fields.get("medium")), lora, salt, plain, _whole(fields.get("group_idx"))
    )


def _hashes(raw: Any) -> tuple[ForeignHash, ...]:
    if not isinstance(raw, list) or not all(isinstance(each, bytes | int) for each in raw):
        raise ValueError("block_hashes of an event are no hashes")
    return tuple(raw)


def _extra(raw: Any, lora: str | None) -> tuple[str | None, bool]:
    """The salt of the first block, and whether nothing else goes into any of them."""
    if not isinstance(raw, list):
        return None, True
    salt, plain = None, True
    for position, keys in enumerate(raw):
        texts: list[str] = []
        for key in keys if isinstance(keys, list | tuple) else ():
            if not isinstance(key, str):
                plain = False
            elif key != lora or texts:
                texts.append(key)
        if position == 0 and texts:
            salt = texts[0]
            plain = plain and len(texts) == 1
        elif texts:
            plain = False
    return salt, plain


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _as_map(event: ForeignEvent) -> dict[str, Any]:
    match event:
        case ForeignStored():
            extra: Sequence[Any] | None = None
            if event.salt is not None or event.lora_name is not None:
                lora = [event.lora_name] if event.lora_name is not None else []
                first = [*lora, event.salt] if event.salt is not None else lora
                extra = [first, *([lora or None] * (len(event.hashes) - 1))]
            return {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": event.lora_name,
                "extra_keys": extra,
                "group_idx": event.group,
            }
        case ForeignRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": event.hashes,
                "medium": event.medium,
                "group_idx": event.group,
            }
        case ForeignCleared():
            return {"type": "AllBlocksCleared"}
