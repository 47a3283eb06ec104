"""Request bodies: read within limits, decoded strictly, refused with the path of what is wrong."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from aiohttp import web

from engine.core import RequestRefused
from engine.server.replies import request_path
from gateway.workers.protocol import GenerateRequest

MAX_REQUEST_ID = 256
_MAX_NAME = 200  # of a field in an answer: names are the client's, and may be as long as the body

BodyT = TypeVar("BodyT")

_AT = re.compile(r"(?s)(.*?)(?: - at (?:`key` in )?`(.*)`)?")
_JSON, _MSGPACK = "application/json", "application/msgpack"


async def read_body(request: web.Request, limit: int, timeout: float) -> bytes:
    """The whole body. Raises RequestRefused for one that is longer than `limit` bytes or takes longer than `timeout`."""
    too_large = RequestRefused(
        "body_too_large",
        f"The body is larger than {limit} bytes; send the prompt as packed_token_ids in MessagePack, or raise --max-body.",
    )
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > limit:
                    raise too_large
    except TimeoutError as error:
        message = f"The body did not arrive within {timeout:g} seconds; {len(body)} bytes of it did. Send the request again."
        raise RequestRefused("body_timeout", message) from error
    except web.RequestPayloadError as error:
        # Chunks or a Content-Encoding that do not add up.
        raise RequestRefused("malformed_body", "The body does not arrive as its headers say; send it again.") from error
    return bytes(body)


def decode(request: web.Request, body: bytes, kind: type[BodyT]) -> BodyT:
    """The body as `kind`, by its Content-Type. Raises RequestRefused."""
    content_type = request.content_type
    try:
        if content_type == _JSON:
            return msgspec.json.decode(body, type=kind)
        if content_type == _MSGPACK:
            return msgspec.msgpack.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        name = "JSON" if content_type == _JSON else "MessagePack"
        raise RequestRefused("malformed_body", f"The body is not valid {name}: {str(error) or 'nested too deeply'}.") from error
    given = "no Content-Type" if "Content-Type" not in request.headers else f"Content-Type {content_type}"
    raise RequestRefused("unsupported_media_type", f"This takes {_JSON} or {_MSGPACK}, not a body with {given}.")


def check_generate(request: GenerateRequest) -> None:
    """What the type cannot say. Raises RequestRefused."""
    if not 1 <= len(request.request_id) <= MAX_REQUEST_ID:
        message = f"request_id has {len(request.request_id)} characters; it must have 1 to {MAX_REQUEST_ID}."
        raise RequestRefused("invalid_request", message, "request_id")
    if (request.token_ids is None) == (request.packed_token_ids is None):
        message = "Give the prompt as token_ids or as packed_token_ids, exactly one of them."
        raise RequestRefused("invalid_request", message, "token_ids")


def _misfit(error: str) -> RequestRefused:
    matched = _AT.fullmatch(error)
    message, path = matched.groups() if matched is not None else (error, None)
    field = _shortened(request_path(path or ""))
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message)
    if unknown is not None:
        field = f"{field}.{_shortened(unknown[1])}".removeprefix(".")
        return RequestRefused("invalid_request", f"{field} is not a field of this request; remove it.", field)
    missing = re.fullmatch(r"Object missing required field `(.*)`", message)
    if missing is not None:
        field = f"{field}.{missing[1]}".removeprefix(".")
        return RequestRefused("invalid_request", f"{field} is missing; add it.", field)
    message = _shortened(message)
    return RequestRefused("invalid_request", f"{field}: {message}." if field else f"{message}.", field or None)


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."
