"""A client's body to an opaque worker and the answer back, byte for byte, in step with how fast the client reads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import orjson
from aiohttp import web

from gateway.admission.gate import Gate, Pass, has_answers
from gateway.admission.priority import ranked
from gateway.apis.endpoint import CLIENT_CLOSED_REQUEST, Arrival
from gateway.apis.headers import LIMITS, REPLICA, REQUEST_ID, session_headers
from gateway.apis.openai.errors import error_body
from gateway.apis.sse import ClientGoneError
from gateway.config import HttpConfig
from gateway.dispatch import PoolDispatcher
from gateway.passthrough.forward import Forwarding, Text, forward
from gateway.passthrough.text import BYTES_PER_TOKEN, answer_limit, chunk_digests, prompt_text
from gateway.passthrough.usage import AnswerReader
from gateway.running import Usage
from gateway.telemetry.telemetry import Operation, Telemetry, TurnSpan
from gateway.turn import SessionRef, Turn, TurnError
from gateway.workers.base import WorkerUnavailableError
from prefix_cache.hashing import root_digest
from sessions.identity import scoped_salt

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 256 * 2**20
# Streams send an event for each token, and a few without any.
_EVENTS_WITHOUT_TOKENS = 256
# What belongs to one connection, or to the gateway alone: its keys are none of the worker's business.
_CONNECTION = ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-authenticate")
_BODY = ("content-length", "content-encoding", "accept-encoding", "expect")
_KEYS = ("authorization", "proxy-authorization", "x-api-key", "api-key", "cookie")
_KEPT_BACK = frozenset({*_CONNECTION, *_BODY, *_KEYS, "host", "forwarded", "idempotency-key"})
_NOT_SENT_BACK = frozenset({*_CONNECTION, "set-cookie", "server", "date"})


class PassThrough:
    """Turns of models that opaque workers serve."""

    def __init__(
        self, dispatcher: PoolDispatcher, telemetry: Telemetry, http: HttpConfig, max_attempts: int, gate: Gate | None = None
    ) -> None:
        """`gate`: what lets turns in; without it every turn begins at once."""
        self._gate = gate
        self._dispatcher = dispatcher
        self._telemetry = telemetry
        self._http = http
        self._max_attempts = max_attempts

    def models(self) -> tuple[str, ...]:
        """Names of the models that opaque workers serve."""
        return self._dispatcher.pool.opaque_models()

    def takes(self, body: Mapping[str, object]) -> bool:
        """Whether a body is for an opaque worker."""
        name = body.get("model")
        return isinstance(name, str) and self._dispatcher.pool.is_opaque(name)

    async def deliver(self, arrival: Arrival, session: SessionRef, path: str, operation: Operation) -> web.StreamResponse:
        """Runs a turn to its end. Raises TurnError as long as nothing was sent.

        An answer that breaks off is told as an event, where it is a stream; else the client's connection breaks off as well.
        A client that leaves cancels this coroutine, which drops the worker's connection.
        """
        turn = Turn(
            request_id=arrival.request_id,
            model=str(arrival.body.get("model")),
            session=session,
            messages=(),
            stream=bool(arrival.body.get("stream")),
        )
        turn, priority = ranked(turn, arrival.request.headers, arrival.caller)
        span = self._telemetry.start_turn(operation, turn, arrival.request.headers)
        forwarding: Forwarding | None = None
        admitted: Pass | None = None
        failure: BaseException | None = None
        reader = AnswerReader(stream=False)
        try:
            text = self._text(arrival, turn)
            if self._gate is not None:
                admitted = await self._gate.enter_opaque(
                    arrival.caller, turn, priority, text.tokens, continuing=has_answers(arrival.body.get("messages"))
                )
                arrival.request[LIMITS].update(admitted.headers)
                span.admitted(priority, admitted.waited)
                admitted.going()
            forwarding = await forward(
                self._dispatcher,
                model=turn.model,
                path=path,
                body=arrival.raw,
                headers=self._headers(arrival, span),
                text=text,
                session=session,
                request_id=arrival.request_id,
                max_attempts=self._max_attempts,
            )
            span.dispatched(forwarding.receipt)
            streams = forwarding.response.content_type == "text/event-stream"
            reader = AnswerReader(stream=streams)
            response = await self._open(arrival, session, forwarding)
            failure = await self._pump(arrival, turn, forwarding, reader, response, span)
            return response
        except BaseException as error:
            failure = error
            raise
        finally:
            if forwarding is not None:
                forwarding.close()
            if admitted is not None:
                said = reader.usage
                used = None
                if said is not None:
                    used = Usage(said.prompt_tokens, said.cached_tokens or 0, said.completion_tokens)
                admitted.left(used, began=forwarding is not None)
            self._conclude(arrival, turn, span, forwarding, reader, failure)

    def _text(self, arrival: Arrival, turn: Turn) -> Text:
        info = self._dispatcher.pool.opaque_info(turn.model)
        salt = arrival.body.get("cache_salt")
        root = root_digest(
            bytes.fromhex(info.namespace), scoped_salt(turn.session.tenant, salt if isinstance(salt, str) else None)
        )
        text = prompt_text(arrival.body)
        return Text(chunk_digests(text, root), root, max(len(text) // BYTES_PER_TOKEN, 1))

    def _headers(self, arrival: Arrival, span: TurnSpan) -> dict[str, str]:
        given = {
            name: value
            for name, value in arrival.request.headers.items()
            if name.lower() not in _KEPT_BACK and not name.lower().startswith(("x-turnkeep-", "x-forwarded-"))
        }
        return {**given, **span.trace_headers(), REQUEST_ID: arrival.request_id}

    async def _open(self, arrival: Arrival, session: SessionRef, forwarding: Forwarding) -> web.StreamResponse:
        upstream = forwarding.response
        headers = {name: value for name, value in upstream.headers.items() if name.lower() not in _NOT_SENT_BACK}
        headers |= {REQUEST_ID: arrival.request_id, REPLICA: forwarding.receipt.worker, **session_headers(session)}
        headers.pop("Content-Length", None)
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        if upstream.content_length is not None:
            response.content_length = upstream.content_length
        try:
            await response.prepare(arrival.request)
        except ConnectionError as error:
            raise ClientGoneError("the client left before the answer began") from error
        return response

    async def _pump(
        self,
        arrival: Arrival,
        turn: Turn,
        forwarding: Forwarding,
        reader: AnswerReader,
        response: web.StreamResponse,
        span: TurnSpan,
    ) -> TurnError | None:
        """The answer to the client. Returns what went wrong with it after it had begun. Raises ClientGoneError."""
        limit, sent = answer_limit(arrival.body), 0
        try:
            while data := await forwarding.read():
                reader.feed(data)
                span.first_token()
                sent += len(data)
                if sent > MAX_ANSWER_BYTES:
                    raise WorkerUnavailableError(f"its answer is longer than {MAX_ANSWER_BYTES} bytes", reached=True)
                if limit is not None and reader.events > limit + _EVENTS_WITHOUT_TOKENS:
                    raise WorkerUnavailableError(f"it sends more than the {limit} tokens that were asked for", reached=True)
                await self._send(response, data)
        except WorkerUnavailableError as error:
            forwarding.failed(error)
            worker = forwarding.receipt.worker
            lost = TurnError(
                502, "worker_lost", f"Worker {worker} was lost while it answered ({error}). Send the request again."
            )
            if response.content_type == "text/event-stream" and response.content_length is None:
                opening = b"" if reader.at_event_end else b"\n\n"
                await self._send(response, opening + b"data: " + orjson.dumps(error_body(lost)) + b"\n\n")
                await response.write_eof()
            elif arrival.request.transport is not None:
                arrival.request.transport.abort()
            return lost
        reader.end()
        if reader.failed and 200 <= response.status < 300:
            # The client has it as it is; but a worker that answers so is not well.
            forwarding.failed(WorkerUnavailableError("it answered 200 with an error", reached=True))
        elif response.status < 400:
            forwarding.answered(reader.usage.cached_share if reader.usage is not None else None)
        else:
            forwarding.refused()
        try:
            await response.write_eof()
        except ConnectionError as error:
            raise ClientGoneError("the client closed the connection") from error
        return None

    async def _send(self, response: web.StreamResponse, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._http.write_timeout):
                await response.write(data)
        except TimeoutError as error:
            raise ClientGoneError(f"the client read nothing for {self._http.write_timeout:g} seconds") from error
        except ConnectionError as error:
            raise ClientGoneError("the client closed the connection") from error

    def _conclude(
        self,
        arrival: Arrival,
        turn: Turn,
        span: TurnSpan,
        forwarding: Forwarding | None,
        reader: AnswerReader,
        failure: BaseException | None,
    ) -> None:
        usage = reader.usage
        status = forwarding.response.status if forwarding is not None else 502
        if isinstance(failure, TurnError):
            status = failure.status
        elif isinstance(failure, ClientGoneError | asyncio.CancelledError):
            status = CLIENT_CLOSED_REQUEST
        if failure is not None:
            span.failed(asyncio.CancelledError() if isinstance(failure, ClientGoneError) else failure)
        elif status >= 400:
            span.failed(TurnError(status, "worker_refused", f"The worker answered {status}."))
        else:
            span.finished(
                response_id=turn.request_id,
                response_model=turn.model,
                finish_reasons=(),
                prompt_tokens=usage.prompt_tokens if usage is not None else 0,
                cached_tokens=(usage.cached_tokens or 0) if usage is not None else 0,
                completion_tokens=usage.completion_tokens if usage is not None else 0,
            )
        log.info(
            "opaque %s request=%s session=%s status=%d worker=%s prompt=%d cached=%s generated=%d seconds=%.3f%s",
            turn.model,
            arrival.request_id,
            turn.session.key,
            status,
            forwarding.receipt.worker if forwarding is not None else None,
            usage.prompt_tokens if usage is not None else 0,
            usage.cached_tokens if usage is not None else None,
            usage.completion_tokens if usage is not None else 0,
            time.monotonic() - arrival.monotonic,
            f" error={str(failure)!r}" if failure is not None else "",
        )
