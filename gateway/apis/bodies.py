"""A request's body: read within limits, parsed, fitted to a typed struct. Every complaint names what is wrong, and where."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import ClientPayloadError, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.apis.body_pieces import BodyPieces
from gateway.apis.nesting import too_deep
from gateway.turn import TurnError

T = TypeVar("T")

_LISTED_FIELDS = 16
_AT_ONCE = 2**20
"""Bytes of bodies that are waited for as a whole."""
_PATH = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`\Z")
_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)

MAX_CONTAINERS = 500_000
"""Arrays and objects in one body. Parsed they take fifty times their text, and parsing holds up every stream."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


async def read_body(request: web.Request, *, max_bytes: int, timeout: float) -> bytes:
    """The whole body. Raises as `receive_body`."""
    pieces = BodyPieces()
    await receive_body(request, pieces.add, max_bytes=max_bytes, timeout=timeout)
    return pieces.whole()


async def receive_body(request: web.Request, take: Callable[[bytes], None], *, max_bytes: int, timeout: float) -> None:
    """Gives the body to `take`, piece by piece; one that says its length, and is not too long, when all of it is here.

    Raises TurnError 413 above `max_bytes`, 408 when it does not arrive within `timeout` seconds, 400 when it breaks off or is
    not encoded as it says.
    """
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)
    content, received = request.content, 0
    try:
        async with asyncio.timeout(timeout):
            if _comes_at_once(request) and content.exception() is None:
                # Woken once and not for every piece. What is read ahead meanwhile is no more than what is kept anyway.
                content.set_read_chunk_size(_AT_ONCE)
                await content.wait_eof()
            while True:
                piece, chunk_ended = await content.readchunk()
                if not piece and (not chunk_ended or content.at_eof()):
                    break  # a request without a body has a reader of its own kind, which says "chunk ended" for ever
                received += len(piece)
                if received > max_bytes:
                    raise _too_large(max_bytes)
                take(piece)
    except TimeoutError as error:
        raise TurnError(
            408,
            "body_timeout",
            f"The body did not arrive within {timeout:g} seconds: {content.total_bytes} bytes came. Send it in one go.",
        ) from error
    except (ClientPayloadError, web.RequestPayloadError, HttpProcessingError, ConnectionError) as error:
        raise TurnError(
            400,
            "malformed_body",
            f"The body broke off after {content.total_bytes} bytes, or is not encoded as its headers say.",
        ) from error


def _comes_at_once(request: web.Request) -> bool:
    """Whether a body is no longer than is read ahead, whatever its sender does."""
    length = request.content_length
    return length is not None and length <= _AT_ONCE and hdrs.CONTENT_ENCODING not in request.headers


def _too_large(max_bytes: int) -> TurnError:
    size = f"{max_bytes / 2**20:g} MiB" if max_bytes >= 2**20 else f"{max_bytes} bytes"
    return TurnError(
        413, "body_too_large", f"The body is larger than {size}, the most this gateway takes (http.max_body_mib raises it)."
    )


def parse_object(raw: bytes) -> tuple[dict[str, Any], list[str]]:
    """The JSON object in a body, and warnings. Raises TurnError 400 that says what is wrong, in which line and column.

    Half surrogate pairs, which JavaScript clients send where they cut a text inside an emoji, are replaced, not refused.
    """
    warnings: list[str] = []
    _check_containers(raw)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        repaired = _ESCAPES.sub(lambda match: rb"\ufffd" if match["half"] else match[0], raw)
        if repaired == raw:
            raise _not_json(raw, error) from error
        try:
            value = orjson.loads(repaired)
        except orjson.JSONDecodeError as second:
            raise _not_json(raw, second) from second
        warnings.append("half surrogate pairs in the body were replaced by U+FFFD")
    if not isinstance(value, dict):
        raise TurnError(400, "malformed_body", f"The body must be a JSON object, not {_kind(value)}.")
    return value, warnings


def _check_containers(raw: bytes) -> None:
    """Raises TurnError 400 for more than MAX_CONTAINERS. Looks into the text only where there are that many brackets, and
    no further than needed, as this is done while every stream waits."""
    if len(raw) <= MAX_CONTAINERS or raw.count(b"[") + raw.count(b"{") <= MAX_CONTAINERS:
        return
    found = at = 0
    for strings, text in enumerate(_STRING.finditer(raw)):
        found += raw.count(b"[", at, text.start()) + raw.count(b"{", at, text.start())
        at = text.end()
        if found > MAX_CONTAINERS or strings > 2 * MAX_CONTAINERS:
            break
    else:
        found += raw.count(b"[", at) + raw.count(b"{", at)
        if found <= MAX_CONTAINERS:
            return
    raise TurnError(
        400,
        "malformed_body",
        f"The body holds more values than are taken: at most {MAX_CONTAINERS} arrays and objects. Send less.",
    )


def _not_json(raw: bytes, error: orjson.JSONDecodeError) -> TurnError:
    if not raw.strip():
        return TurnError(400, "malformed_body", "The body is empty; a JSON object is expected.")
    try:
        raw.decode()
    except UnicodeDecodeError as decoding:
        return TurnError(
            400,
            "malformed_body",
            f"The body is not UTF-8: byte {decoding.start} (0x{raw[decoding.start]:02x}) is out of place.",
        )
    if "depth" in error.msg:
        return too_deep(error.doc, error.pos)
    return TurnError(
        400, "malformed_body", f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."
    )


def fit(value: object, kind: type[T], *, at: str = "") -> T:
    """`value` as a `kind`. Raises TurnError 400 that names the field, with `at` before it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        path = found["path"] if found else ""
        missing = re.search(r"missing required field `([^`]+)`", text)
        if missing:
            path = f"{path}.{missing[1]}" if path else missing[1]
            text = "this field is missing"
        else:
            text = _friendly(text[: found.start()] if found else text)
        path = f"{at}.{path}" if at and path and not path.startswith("[") else at + path
        raise TurnError(400, "invalid_request", f"{path + ': ' if path else ''}{text}.", param=path or None) from error


_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}


def _friendly(text: str) -> str:
    """msgspec's sentence in JSON's words."""

    def rename(match: re.Match[str]) -> str:
        kinds = [_NAMES.get(name.strip(), name.strip()) for name in match[1].split("|")]
        return " or ".join(kinds)

    text = re.sub(r"`([a-z]+(?: \| [a-z]+)*)`", rename, text)
    return text[:1].lower() + text[1:]


def unknown_fields(body: dict[str, Any], kind: type[msgspec.Struct], also: Iterable[str] = ()) -> list[str]:
    """A warning that lists the fields of `body` that `kind` does not have; [] when there are none."""
    known = {*kind.__struct_encode_fields__, *also}
    unknown = [name for name in body if name not in known]
    if not unknown:
        return []
    listed = ", ".join(name[:64] for name in unknown[:_LISTED_FIELDS])
    rest = len(unknown) - _LISTED_FIELDS
    return [f"ignored unknown fields: {listed}" + (f" and {rest} more" if rest > 0 else "")]


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return {str: "a string", list: "an array", bool: "a boolean", int: "a number", float: "a number"}[type(value)]
