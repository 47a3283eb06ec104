"""The gateway's HTTP application: routes, and errors as sentences in the caller's dialect."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import orjson
from aiohttp import web

from gateway.admission.gate import Gate, make_gate
from gateway.apis.administration import AdminRoutes, Drain, Metrics, Workers
from gateway.apis.arrivals import Arrivals
from gateway.apis.endpoint import TurnEndpoint
from gateway.apis.headers import KNOWN_AS, LIMITS, REQUEST_ID, request_id
from gateway.apis.keeping import KeepingRoutes
from gateway.apis.openai.errors import error_body
from gateway.apis.openai.routes import OpenAIRoutes
from gateway.apis.routes import RouteRoutes
from gateway.apis.sessions import SessionRoutes
from gateway.apis.watching import WatchRoutes
from gateway.auth import ADMINISTRATION, ApiKeys
from gateway.config import GatewayConfig
from gateway.cors import allow_origins, mark
from gateway.discovery.registration import RegistrationRoutes
from gateway.passthrough.endpoint import PassThrough
from gateway.pipeline import Pipeline
from gateway.router.receipts import RouteLog
from gateway.turn import TurnError
from gateway.turns.registry import TurnRegistry

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ReadyReasons = Callable[[], Sequence[str]]
"""Why the gateway is not ready to serve, beyond models without workers; empty when it is."""


class Applications(NamedTuple):
    """What is served: to everybody, and on the port for administration."""

    public: web.Application
    administration: web.Application


def make_apps(
    config: GatewayConfig,
    pipeline: Pipeline,
    *,
    reasons: ReadyReasons = tuple,
    workers: Workers = tuple,
    drain: Drain = lambda name, draining: False,
    metrics: Metrics | None = None,
    passthrough: PassThrough | None = None,
    routes: RouteLog | None = None,
    registration: RegistrationRoutes | None = None,
    gate: Gate | None = None,
) -> Applications:
    """The applications. Serve them with `gateway.server.HttpServer`, which cancels a handler when its client leaves; the public
    one always, as it owns what both use. `metrics`: of more processes than this one.
    `gate`: what lets turns in; without it every turn begins at once.
    Raises ValueError for keys that cannot be used."""
    # Bodies are bounded while they are read (gateway.apis.bodies), in the caller's dialect.
    origins = config.http.cors_origins
    outer = [allow_origins(origins)] if origins else []
    app = web.Application(middlewares=[*outer, _answer_errors], client_max_size=0)
    keys = ApiKeys(config.auth)
    gate = gate if gate is not None else make_gate(config, pipeline.telemetry)
    arrivals = Arrivals(
        config,
        keys,
        gate.limits,
        pipeline.telemetry.stages,
        keeps_raw=passthrough.takes if passthrough is not None else lambda body: False,
    )
    endpoint = TurnEndpoint(pipeline, config.http, TurnRegistry(config.turns), gate)
    OpenAIRoutes(pipeline, endpoint, arrivals, config.http, passthrough).add_to(app.router)
    administration = web.Application(middlewares=[_answer_errors], client_max_size=0)
    administration[ADMINISTRATION] = True
    admin = AdminRoutes(arrivals, keys, pipeline.telemetry, workers, drain, gate.admission, metrics)
    for each in (app, administration):
        # Administrators look at what tenants see, too.
        sessions = SessionRoutes(pipeline, arrivals)
        WatchRoutes(pipeline, arrivals, sessions.show).add_to(each.router)
        KeepingRoutes(pipeline, arrivals).add_to(each.router)
        sessions.add_to(each.router)
        if routes is not None:
            RouteRoutes(routes, arrivals).add_to(each.router)
        _Probes(pipeline, reasons).add_to(each.router)
        if registration is not None:
            registration.add_to(each.router)
        admin.add_to(each.router)
    if origins:
        app.on_response_prepare.append(mark)
    app.on_response_prepare.append(_say_limits)
    app.cleanup_ctx.append(keys.follow)
    app.on_cleanup.append(_closing(pipeline, gate))
    return Applications(app, administration)


def make_app(config: GatewayConfig, pipeline: Pipeline, *, reasons: ReadyReasons = tuple) -> web.Application:
    """The public application alone."""
    return make_apps(config, pipeline, reasons=reasons).public


class _Probes:
    """What orchestrators ask. Open to everybody: they say nothing about what anybody sent."""

    def __init__(self, pipeline: Pipeline, reasons: ReadyReasons) -> None:
        self._pipeline = pipeline
        self._reasons = reasons

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/health", self.health)
        router.add_get("/ready", self.ready)

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as the process answers at all."""
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 when every model has a worker; else 503 with the reasons."""
        reasons = list(self._reasons())
        for model in self._pipeline.models.all:
            try:
                self._pipeline.pool_info(model)
            except TurnError as error:
                reasons.append(error.message)
        if reasons:
            return web.json_response({"status": "not ready", "reasons": reasons}, status=503, headers={"Retry-After": "1"})
        return web.json_response({"status": "ready"})


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong before an answer has begun becomes an error body; nothing else leaves the process."""
    known_as = request_id(request.headers)
    request[KNOWN_AS] = known_as
    try:
        response = await handler(request)
    except TurnError as error:
        response = error_response(error)
    except web.HTTPException as error:
        response = error_response(_from_aiohttp(request, error), error)
    except Exception:
        log.exception("request %s failed", known_as)
        response = error_response(TurnError(500, "internal_error", "The gateway failed on this request; its log says why."))
    if request.content.exception() is not None:
        # The rest of the body cannot be read, so nothing after it on this connection can be either.
        response.force_close()
        request.content.feed_eof()
    if not response.prepared:
        response.headers.setdefault(REQUEST_ID, known_as)
    return response


def error_response(error: TurnError, source: web.HTTPException | None = None) -> web.Response:
    """An error in OpenAI's shape, with Retry-After where it has one."""
    headers = {"Allow": source.headers["Allow"]} if source is not None and "Allow" in source.headers else {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    return web.Response(
        status=error.status, body=orjson.dumps(error_body(error)), content_type="application/json", headers=headers
    )


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> TurnError:
    if error.status == 404:
        return TurnError(404, "not_found", f"There is nothing at {request.path[:200]}. docs/http-api.md lists the endpoints.")
    if error.status == 405:
        allowed = error.headers.get("Allow", "another method")
        return TurnError(405, "method_not_allowed", f"{request.path[:200]} takes {allowed}, not {request.method}.")
    return TurnError(error.status, "invalid_request", f"{error.reason}.")


async def _say_limits(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(request.get(LIMITS, {}))


def _closing(pipeline: Pipeline, gate: Gate) -> Callable[[web.Application], Awaitable[None]]:
    async def close(_app: web.Application) -> None:
        await gate.aclose()
        pipeline.close()

    return close
