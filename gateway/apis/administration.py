"""What administrators ask: the workers, and metrics. Served on the port for administration too, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson
from aiohttp import web

from gateway.apis.arrivals import Arrivals
from gateway.auth import ApiKeys
from gateway.telemetry.telemetry import Telemetry
from gateway.workers.views import WorkerView

Workers = Callable[[], Sequence[WorkerView]]


class AdminRoutes:
    """Every handler begins with `Arrivals.require_admin`; metrics may be open to everybody."""

    def __init__(self, arrivals: Arrivals, keys: ApiKeys, telemetry: Telemetry, workers: Workers) -> None:
        self._arrivals = arrivals
        self._keys = keys
        self._telemetry = telemetry
        self._workers = workers

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Registers the endpoints."""
        router.add_get("/metrics", self.metrics)
        router.add_get("/workers", self.workers)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        if not self._keys.open_metrics:
            self._arrivals.require_admin(request)
        telemetry = self._telemetry
        return web.Response(body=telemetry.render_metrics(), headers={"Content-Type": telemetry.METRICS_CONTENT_TYPE})

    async def workers(self, request: web.Request) -> web.Response:
        """Every worker as this process sees it."""
        self._arrivals.require_admin(request)
        data = [_worker(view) for view in self._workers()]
        return web.Response(body=orjson.dumps({"object": "list", "data": data}), content_type="application/json")


def _worker(view: WorkerView) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(view)
    return {"object": "worker", **shown}
