"""What administrators ask: the workers, and metrics. Served on the port for administration too, where there is one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import orjson
from aiohttp import web

from gateway.admission.controller import Admission
from gateway.apis.arrivals import Arrivals
from gateway.auth import ApiKeys
from gateway.telemetry.telemetry import Telemetry
from gateway.turn import TurnError
from gateway.workers.views import WorkerView

Metrics = Callable[[], Awaitable[bytes]]
"""Prometheus text."""
Workers = Callable[[], Sequence[WorkerView]]
Drain = Callable[[str, bool], bool]
"""(worker, draining): False when nobody is called so."""

_MAX_WAIT = 600.0
_LOOK_AGAIN = 0.1


class AdminRoutes:
    """Every handler begins with `Arrivals.require_admin`; metrics may be open to everybody."""

    def __init__(
        self,
        arrivals: Arrivals,
        keys: ApiKeys,
        telemetry: Telemetry,
        workers: Workers,
        drain: Drain,
        admission: Admission,
        metrics: Metrics | None = None,
    ) -> None:
        """`metrics`: of more than this process."""
        self._metrics = metrics
        self._admission = admission
        self._arrivals = arrivals
        self._keys = keys
        self._telemetry = telemetry
        self._workers = workers
        self._drain = drain

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Registers the endpoints."""
        router.add_get("/metrics", self.metrics)
        router.add_get("/workers", self.workers)
        router.add_get("/admission", self.admission)
        router.add_post("/workers/{id}/drain", self.drain)
        router.add_delete("/workers/{id}/drain", self.undrain)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        if not self._keys.open_metrics:
            self._arrivals.require_admin(request)
        telemetry = self._telemetry
        body = telemetry.render_metrics() if self._metrics is None else await self._metrics()
        return web.Response(body=body, headers={"Content-Type": telemetry.METRICS_CONTENT_TYPE})

    async def workers(self, request: web.Request) -> web.Response:
        """Every worker as this process sees it."""
        self._arrivals.require_admin(request)
        data = [_worker(view) for view in self._workers()]
        return web.Response(body=orjson.dumps({"object": "list", "data": data}), content_type="application/json")

    async def admission(self, request: web.Request) -> web.Response:
        """What waits, by class and by tenant, and what was turned away since the start."""
        self._arrivals.require_admin(request)
        admission = self._admission
        body = {
            "object": "admission",
            "in_flight": admission.in_flight,
            "queued": dict(admission.depths()),
            "queued_tokens": admission.queued_tokens(),
            "queued_by_tenant": dict(admission.tenants()),
            "shed": [{"reason": why, "kind": kind, "count": count} for (why, kind), count in sorted(admission.sheds.items())],
        }
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def drain(self, request: web.Request) -> web.Response:
        """Nothing new goes to the worker; what runs there comes to its end. `?wait=SECONDS`: answers when it has, or then."""
        self._arrivals.require_admin(request)
        name, wait = request.match_info["id"], _wait(request)
        self._set(name, draining=True)
        deadline = time.monotonic() + wait
        while (view := self._view(name)).in_flight and (left := deadline - time.monotonic()) > 0:  # noqa: ASYNC110
            # Whoever waits here is one operator; that every end of a request told somebody would cost all the others.
            await asyncio.sleep(min(left, _LOOK_AGAIN))
        return _one(view)

    async def undrain(self, request: web.Request) -> web.Response:
        """It takes requests again."""
        self._arrivals.require_admin(request)
        name = request.match_info["id"]
        self._set(name, draining=False)
        return _one(self._view(name))

    def _set(self, name: str, *, draining: bool) -> None:
        if not self._drain(name, draining):
            raise _unknown(name)

    def _view(self, name: str) -> WorkerView:
        for view in self._workers():
            if view.name == name:
                return view
        raise _unknown(name)


def _unknown(name: str) -> TurnError:
    return TurnError(404, "not_found", f"There is no worker called {name[:128]!r}. GET /workers lists them.")


def _wait(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MAX_WAIT:
        message = f"wait is {text[:40]!r}; give the seconds to wait for the worker to be empty, 0 to {_MAX_WAIT:g}."
        raise TurnError(400, "invalid_request", message, param="wait")
    return seconds


def _one(view: WorkerView) -> web.Response:
    return web.Response(body=orjson.dumps(_worker(view)), content_type="application/json")


def _worker(view: WorkerView) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(view)
    return {"object": "worker", **shown}
