"""A parsed turn to a finished HTTP response, whatever the dialect: start it, deliver it, and tell everybody how it went."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from gateway.admission.gate import Gate
from gateway.admission.priority import ranked
from gateway.apis.body_memo import Remembered
from gateway.apis.codec import Answer
from gateway.apis.headers import (
    LIMITS,
    REQUEST_ID,
    attached_header,
    miss_header,
    placement_headers,
    session_headers,
    warning_header,
)
from gateway.apis.sse import PING, ClientGoneError, EventStream
from gateway.auth import Caller
from gateway.choices import ChoiceDelta, TurnEvent
from gateway.config import HttpConfig
from gateway.histories.keeper import TurnHistory
from gateway.models import ServedModel
from gateway.patience import Patience
from gateway.pipeline import Pipeline
from gateway.running import RunningTurn, Usage
from gateway.turn import Prompt, Turn, TurnError, TurnRecord
from gateway.turns.reader import Reader
from gateway.turns.registry import Joined, TurnRegistry, idempotency_key
from gateway.turns.shared import Begun, is_refusal
from gateway.workers.protocol import WorkerInfo

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499

MakePrompts = Callable[[WorkerInfo], Awaitable[tuple[Sequence[Prompt], TurnHistory | None]]]
"""The prompts of a turn, and its part in its session where it has one."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it came. `request_id` is what the client may know it by; `raw` the body, where it goes on as it is; `seen`
    what of it is known from the request before."""

    request: web.Request
    request_id: str
    body: dict[str, Any]
    wall_clock: float
    monotonic: float
    caller: Caller
    raw: bytes = b""
    seen: Remembered | None = None


@dataclass(slots=True)
class _Outcome:
    """How a turn went, for its record."""

    running: RunningTurn | None = None
    status: int = 500
    error: str | None = None
    first_token: float | None = None
    response: Mapping[str, Any] | None = None


class TurnEndpoint:
    """Delivers turns. One object serves every API of the gateway."""

    def __init__(self, pipeline: Pipeline, http: HttpConfig, turns: TurnRegistry, gate: Gate) -> None:
        self._pipeline = pipeline
        self._gate = gate
        self._http = http
        self._turns = turns

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

        A request that is another try of a turn in flight reads along there. A client that leaves cancels this coroutine (the
        server runs with handler_cancellation); the last one that reads a turn ends the generation on its worker, queued,
        prefilling or decoding.
        """
        turn, priority = ranked(turn, arrival.request.headers, arrival.caller)
        patience = Patience(self._http.request_timeout, self._http.stall_timeout, arrival.monotonic)
        span = self._pipeline.telemetry.start_turn(answer.operation, turn, arrival.request.headers)
        outcome = _Outcome()
        failure: BaseException | None = None
        response: web.StreamResponse | None = None
        stream: EventStream | None = None
        joined: Joined | None = None
        begun: Begun | None = None

        async def start() -> Begun:
            info = self._pipeline.pool_info(model)
            self._gate.check(model.name, turn, priority)
            prompts, history = await make_prompts(info)
            watched = self._pipeline.watch.began(turn, history)
            admitted = await self._gate.enter(arrival.caller, model.name, turn, priority, prompts, history, info)
            arrival.request[LIMITS].update(admitted.headers)
            span.admitted(priority, admitted.waited)
            try:
                admitted.going()
                running = await self._pipeline.run(
                    model, turn, prompts, info, span.trace_headers(), history=history, plain=plain, ended=admitted.left
                )
            except BaseException as error:
                admitted.left(None)
                if not is_refusal(error):
                    await asyncio.shield(self._pipeline.settle(history, None))
                raise
            admitted.gone()
            for receipt in running.receipts:
                span.dispatched(receipt)
            return Begun(running, history, watched)

        async def settle(begun: Begun, complete: bool) -> None:
            running = begun.running if complete else None
            self._pipeline.watch.ended(begun.watched, running)
            missed = begun.watched is not None and begun.watched.miss is not None
            await self._pipeline.settle(begun.history, running, final=turn.session.final, missed=missed)

        async def begin(reader: Reader) -> Begun:
            try:
                while (begun := await reader.begun(patience.whole())) is None:
                    patience.check_whole()
            except TurnError as error:
                if stream is not None and stream.is_open:
                    await stream.send(answer.failure(error))
                    await stream.close()
                raise
            patience.heard()
            outcome.running = begun.running
            if joined is not None and joined.how is not None:
                for receipt in outcome.running.receipts:
                    span.dispatched(receipt, counted=False)
            return begun

        def first_token() -> None:
            outcome.first_token = time.monotonic() - arrival.monotonic
            span.first_token()

        try:
            joined = self._turns.join(
                session=turn.session,
                idempotency_key=idempotency_key(arrival.request.headers),
                body=arrival.body,
                request_id=arrival.request_id,
                answer=answer,
                stream=turn.stream,
                start=start,
                settle=settle,
            )
            if joined.refused:
                self._pipeline.telemetry.turn_attached("refused")
            if joined.how is not None:
                answer.adopt(joined.answer)
                span.attached(joined.how, joined.first)
            try:
                if turn.stream:
                    stream = EventStream(arrival.request, write_timeout=self._http.write_timeout)
                    await self._keep_waiting(stream, arrival, turn, joined, patience)
                begun = await begin(joined.reader)
                if stream is not None:
                    response = stream.response
                    failure = await self._stream(stream, arrival, turn, joined, begun, answer, first_token, patience)
                else:
                    response = await self._whole(arrival, turn, joined, begun, answer, outcome, first_token, patience)
            finally:
                await self._turns.leave(joined)
        except BaseException as error:
            # Hanging up after the last event is how a satisfied client leaves; it is not the turn's failure.
            satisfied = stream is not None and stream.delivered and isinstance(error, ClientGoneError | asyncio.CancelledError)
            failure = None if satisfied else error
            response = stream.response if stream is not None else None
            told = isinstance(error, ClientGoneError) or (
                isinstance(error, TurnError) and stream is not None and stream.is_open
            )
            if not told or response is None:
                raise
        finally:
            if failure is None and outcome.running is not None:
                outcome.status = 200
                if outcome.response is None and self._pipeline.observed:
                    outcome.response = answer.body(outcome.running)
            tell = failure is not None or joined is None or joined.tell_once()
            self._conclude(arrival, turn, model, answer, outcome, failure, tell=tell)
            if begun is not None and begun.watched is not None and begun.watched.miss is not None:
                span.missed(begun.watched.miss)
            if outcome.running is not None and joined is not None and joined.how is None:
                for migration in outcome.running.migrations:
                    span.migrated(migration)
            if failure is None and outcome.running is not None:
                usage = outcome.running.usage
                span.finished(
                    response_id=turn.request_id,
                    response_model=model.name,
                    finish_reasons=[choice.finish_reason or "" for choice in outcome.running.choices],
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    completion_tokens=usage.completion_tokens,
                    counted=tell,
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
        joined: Joined,
        begun: Begun,
        answer: Answer,
        outcome: _Outcome,
        first_token: Callable[[], None],
        patience: Patience,
    ) -> web.Response:
        reader, running = joined.reader, begun.running
        reader.follow(first_token)
        while not await reader.wait_end(patience.left()):
            patience.heard(reader.shared.heard)
            patience.check()
        reader.take()
        headers = self._headers(arrival, turn, joined, begun, started=True)
        outcome.response = answer.body(running)
        return web.Response(body=orjson.dumps(outcome.response), content_type="application/json", headers=headers)

    def _headers(self, arrival: Arrival, turn: Turn, joined: Joined, begun: Begun, *, started: bool) -> dict[str, str]:
        watched = begun.watched
        if started:
            self._pipeline.watch.started(watched, begun.running)
        miss = watched.miss if watched is not None else None
        return {
            REQUEST_ID: arrival.request_id,
            **session_headers(begun.running.session),
            **placement_headers(begun.running, started=started),
            **miss_header(miss),
            **attached_header(joined.how, joined.first),
            **warning_header((*turn.warnings, *begun.running.warnings)),
        }

    async def _keep_waiting(
        self, stream: EventStream, arrival: Arrival, turn: Turn, joined: Joined, patience: Patience
    ) -> None:
        """Waits until the turn is on its workers, or never will be. A client that has waited for long gets headers, which
        cannot say where the turn goes, and comments: what goes wrong from then on is told in the stream."""
        reader, interval = joined.reader, self._http.ping_interval
        if await reader.wait_begun(patience.within(self._http.headers_within)) or patience.over:
            return
        known = {**session_headers(turn.session), **attached_header(joined.how, joined.first), **warning_header(turn.warnings)}
        await stream.open({REQUEST_ID: arrival.request_id, **known})
        await stream.send(PING)
        while not await reader.wait_begun(patience.within(max(0.0, interval - stream.idle))) and not patience.over:
            await stream.send(PING)

    async def _stream(
        self,
        stream: EventStream,
        arrival: Arrival,
        turn: Turn,
        joined: Joined,
        begun: Begun,
        answer: Answer,
        first_token: Callable[[], None],
        patience: Patience,
    ) -> TurnError | None:
        """Returns the error that the stream ended with. Raises TurnError while nothing was sent, ClientGoneError."""
        # The headers can say what was cached once the prompts have left their queues; but they do not wait for ever.
        running = begun.running
        if not stream.is_open:
            started = await joined.reader.wait_started(self._http.headers_within)
            await stream.open(self._headers(arrival, turn, joined, begun, started=started))
        await stream.send(answer.opening(running))
        failure: TurnError | None = None
        try:
            await self._pump(stream, joined.reader, answer, first_token, patience)
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
        self, stream: EventStream, reader: Reader, answer: Answer, first_token: Callable[[], None], patience: Patience
    ) -> None:
        """Events to the client; a comment whenever nothing was sent for `ping_interval`, also while text is withheld."""
        interval = self._http.ping_interval
        seen = False
        while True:
            if not reader.ready:
                left, quiet = patience.left(), max(0.0, interval - stream.idle)
                if not await reader.wait(quiet if left is None else min(quiet, left)):
                    patience.check()
                    if stream.idle >= interval:
                        await stream.send(PING)
                    continue
            patience.heard(reader.shared.heard)
            frames: list[bytes] = []
            while reader.ready and (event := reader.take()) is not None:
                if not seen and _has_tokens(event):
                    seen = True
                    first_token()
                frames.append(answer.event(event))
            # What came at once goes at once.
            await stream.send(frames[0] if len(frames) == 1 else b"".join(frames))
            if event is None:
                return
            if stream.idle >= interval:
                await stream.send(PING)  # text is withheld

    def _conclude(
        self,
        arrival: Arrival,
        turn: Turn,
        model: ServedModel,
        answer: Answer,
        outcome: _Outcome,
        failure: BaseException | None,
        *,
        tell: bool,
    ) -> None:
        if isinstance(failure, TurnError):
            outcome.status, outcome.error = failure.status, failure.message
        elif isinstance(failure, ClientGoneError | asyncio.CancelledError):
            outcome.status, outcome.error = CLIENT_CLOSED_REQUEST, str(failure) or "the client left"
        elif failure is not None:
            outcome.status, outcome.error = 500, f"{type(failure).__name__}: {failure}"
        running = outcome.running
        duration = time.monotonic() - arrival.monotonic
        session = running.session if running is not None else turn.session
        usage = running.usage if running is not None else Usage()
        worker = running.workers if running is not None else None
        if tell and self._pipeline.observed:
            record = TurnRecord(
                request_id=turn.request_id,
                dialect=answer.dialect,
                model=model.name,
                session=session,
                started_at=arrival.wall_clock,
                duration=duration,
                time_to_first_token=outcome.first_token,
                request=arrival.body,
                response=outcome.response,
                status=outcome.status,
                finish_reason=running.choices[0].finish_reason if running is not None and running.choices else None,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                worker=worker,
                error=outcome.error,
            )
            self._pipeline.tell(record)
        if not log.isEnabledFor(logging.INFO):
            return
        log.info(
            "%s %s request=%s session=%s status=%d worker=%s prompt=%d cached=%d generated=%d seconds=%.3f%s%s",
            answer.dialect,
            turn.request_id,
            arrival.request_id,
            session.key,
            outcome.status,
            worker,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            duration,
            f" resumed={len(running.migrations)}" if running is not None and running.migrations else "",
            f" error={outcome.error!r}" if outcome.error else "",
        )


def _has_tokens(event: TurnEvent) -> bool:
    return isinstance(event, ChoiceDelta) and bool(event.token_ids)
