"""A parsed turn to a finished HTTP response, whatever the dialect: start it, deliver it, and tell everybody how it went."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from gateway.apis.codec import Answer
from gateway.apis.headers import REQUEST_ID, placement_headers, session_headers, warning_header
from gateway.apis.sse import PING, ClientGoneError, EventStream
from gateway.choices import ChoiceDelta, TurnEvent
from gateway.config import HttpConfig
from gateway.histories.keeper import TurnHistory
from gateway.models import ServedModel
from gateway.pipeline import Pipeline
from gateway.running import RunningTurn
from gateway.turn import Prompt, Turn, TurnError, TurnRecord
from gateway.workers.protocol import WorkerInfo

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499

MakePrompts = Callable[[WorkerInfo], Awaitable[tuple[Sequence[Prompt], TurnHistory | None]]]
"""The prompts of a turn, and its part in its session where it has one."""


Settle = Callable[[], Awaitable[None]]
"""Writes the turn into its session. Before its client has the last byte: the next turn may follow at once."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it came. `request_id` is what the client may know it by."""

    request: web.Request
    request_id: str
    body: Mapping[str, Any]
    wall_clock: float
    monotonic: float


@dataclass(slots=True)
class _Outcome:
    """How a turn went, for its record."""

    running: RunningTurn | None = None
    status: int = 500
    error: str | None = None
    first_token: float | None = None
    response: Mapping[str, Any] | None = None
    history: TurnHistory | None = None


class TurnEndpoint:
    """Delivers turns. One object serves every API of the gateway."""

    def __init__(self, pipeline: Pipeline, http: HttpConfig) -> None:
        self._pipeline = pipeline
        self._http = http

    async def deliver(
        self,
        arrival: Arrival,
        model: ServedModel,
        turn: Turn,
        make_prompts: MakePrompts,
        answer: Answer,
        *,
        plain: bool = False,
    ) -> web.StreamResponse:
        """Runs a turn to its end. Raises TurnError as long as nothing was sent; later errors become part of the stream.

        A client that leaves cancels this coroutine (the server runs with handler_cancellation), which ends the generation
        on its worker, queued, prefilling or decoding.
        """
        span = self._pipeline.telemetry.start_turn(answer.operation, turn, arrival.request.headers)
        outcome = _Outcome()
        failure: BaseException | None = None
        response: web.StreamResponse | None = None
        stream: EventStream | None = None
        try:
            info = self._pipeline.pool_info(model)
            prompts, outcome.history = await make_prompts(info)
            running = await self._pipeline.run(model, turn, prompts, info, span.trace_headers(), plain=plain)
            outcome.running = running
            try:
                for receipt in running.receipts:
                    span.dispatched(receipt)

                def first_token() -> None:
                    outcome.first_token = time.monotonic() - arrival.monotonic
                    span.first_token()

                async def settle() -> None:
                    await self._pipeline.settle(outcome.history, running)

                if turn.stream:
                    stream = EventStream(arrival.request, write_timeout=self._http.write_timeout)
                    response = stream.response
                    failure = await self._stream(stream, arrival, turn, running, answer, first_token, settle)
                else:
                    response = await self._whole(arrival, turn, running, answer, first_token, settle)
            finally:
                await running.aclose()
        except BaseException as error:
            # Hanging up after the last event is how a satisfied client leaves; it is not the turn's failure.
            satisfied = stream is not None and stream.delivered and isinstance(error, ClientGoneError | asyncio.CancelledError)
            failure = None if satisfied else error
            if not isinstance(error, ClientGoneError) or response is None:
                raise
        finally:
            if outcome.history is not None and not outcome.history.closed:
                await asyncio.shield(self._pipeline.settle(outcome.history, None))
            if failure is None and outcome.running is not None:
                outcome.status = 200
                outcome.response = answer.body(outcome.running)
            self._conclude(arrival, turn, model, answer, outcome, failure)
            if failure is None and outcome.running is not None:
                usage = outcome.running.usage
                span.finished(
                    response_id=turn.request_id,
                    response_model=model.name,
                    finish_reasons=[choice.finish_reason or "" for choice in outcome.running.choices],
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    completion_tokens=usage.completion_tokens,
                )
            elif failure is not None:
                span.failed(asyncio.CancelledError() if isinstance(failure, ClientGoneError) else failure)
            if stream is not None and isinstance(failure, ClientGoneError):
                stream.drop()
        return response

    async def _whole(
        self,
        arrival: Arrival,
        turn: Turn,
        running: RunningTurn,
        answer: Answer,
        first_token: Callable[[], None],
        settle: Settle,
    ) -> web.Response:
        async with aclosing(running.events()) as events:
            seen = False
            async for event in events:
                if not seen and _has_tokens(event):
                    seen = True
                    first_token()
        await settle()
        headers = {
            REQUEST_ID: arrival.request_id,
            **session_headers(turn.session),
            **placement_headers(running, started=True),
            **warning_header(turn.warnings),
        }
        return web.Response(body=orjson.dumps(answer.body(running)), content_type="application/json", headers=headers)

    async def _stream(
        self,
        stream: EventStream,
        arrival: Arrival,
        turn: Turn,
        running: RunningTurn,
        answer: Answer,
        first_token: Callable[[], None],
        settle: Settle,
    ) -> TurnError | None:
        """Returns the error that the stream ended with. Raises TurnError while nothing was sent, ClientGoneError."""
        starting = asyncio.ensure_future(running.started())
        try:
            return await self._stream_from(starting, stream, arrival, turn, running, answer, first_token, settle)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def _stream_from(
        self,
        starting: asyncio.Future[None],
        stream: EventStream,
        arrival: Arrival,
        turn: Turn,
        running: RunningTurn,
        answer: Answer,
        first_token: Callable[[], None],
        settle: Settle,
    ) -> TurnError | None:
        # The headers can say what was cached once the prompts have left their queues; but they do not wait for ever.
        await asyncio.wait({starting}, timeout=self._http.headers_within)
        if starting.done():
            starting.result()
        started = starting.done()
        headers = {
            REQUEST_ID: arrival.request_id,
            **session_headers(turn.session),
            **placement_headers(running, started=started),
            **warning_header(turn.warnings),
        }
        await stream.open(headers)
        await stream.send(answer.opening(running))
        failure: TurnError | None = None
        try:
            async with aclosing(_after(starting, running)) as events:
                await self._pump(stream, events, answer, first_token)
            await settle()
            await stream.send(answer.closing(running), last=True)
        except TurnError as error:
            failure = error
            await stream.send(answer.failure(error))
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("request %s failed while streaming", arrival.request_id)
            failure = TurnError(500, "internal_error", "The gateway failed on this request; its log says why.")
            await stream.send(answer.failure(failure))
        await stream.close()
        return failure

    async def _pump(
        self,
        stream: EventStream,
        events: AsyncGenerator[TurnEvent, None],
        answer: Answer,
        first_token: Callable[[], None],
    ) -> None:
        """Events to the client; a comment whenever nothing was sent for `ping_interval`, also while text is withheld."""
        interval = self._http.ping_interval
        waiting: asyncio.Future[TurnEvent | None] | None = None
        seen = False
        try:
            while True:
                if waiting is None:
                    waiting = asyncio.ensure_future(anext(events, None))
                await asyncio.wait({waiting}, timeout=max(0.0, interval - stream.idle))
                if waiting.done():
                    event = waiting.result()
                    waiting = None
                    if event is None:
                        return
                    if not seen and _has_tokens(event):
                        seen = True
                        first_token()
                    await stream.send(answer.event(event))
                if stream.idle >= interval:
                    await stream.send(PING)
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    def _conclude(
        self,
        arrival: Arrival,
        turn: Turn,
        model: ServedModel,
        answer: Answer,
        outcome: _Outcome,
        failure: BaseException | None,
    ) -> None:
        if isinstance(failure, TurnError):
            outcome.status, outcome.error = failure.status, failure.message
        elif isinstance(failure, ClientGoneError | asyncio.CancelledError):
            outcome.status, outcome.error = CLIENT_CLOSED_REQUEST, str(failure) or "the client left"
        elif failure is not None:
            outcome.status, outcome.error = 500, f"{type(failure).__name__}: {failure}"
        running = outcome.running
        duration = time.monotonic() - arrival.monotonic
        usage = running.usage if running is not None else None
        record = TurnRecord(
            request_id=turn.request_id,
            dialect=answer.dialect,
            model=model.name,
            session=turn.session,
            started_at=arrival.wall_clock,
            duration=duration,
            time_to_first_token=outcome.first_token,
            request=arrival.body,
            response=outcome.response,
            status=outcome.status,
            finish_reason=running.choices[0].finish_reason if running is not None and running.choices else None,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            completion_tokens=usage.completion_tokens if usage else 0,
            cached_tokens=usage.cached_tokens if usage else 0,
            worker=running.workers if running is not None else None,
            error=outcome.error,
        )
        self._pipeline.tell(record)
        log.info(
            "%s %s request=%s session=%s status=%d worker=%s prompt=%d cached=%d generated=%d seconds=%.3f%s",
            record.dialect,
            record.request_id,
            arrival.request_id,
            record.session.key,
            record.status,
            record.worker,
            record.prompt_tokens,
            record.cached_tokens,
            record.completion_tokens,
            duration,
            f" error={record.error!r}" if record.error else "",
        )


async def _after(starting: asyncio.Future[None], running: RunningTurn) -> AsyncGenerator[TurnEvent, None]:
    """The events of a turn; until it has started nobody else may wait on its generations."""
    await starting
    async with aclosing(running.events()) as events:
        async for event in events:
            yield event


def _has_tokens(event: TurnEvent) -> bool:
    return isinstance(event, ChoiceDelta) and bool(event.token_ids)
