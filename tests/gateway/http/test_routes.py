"""GET /v1/routes over decisions of a real router: everybody's own, administrators' all, and nothing that is not asked for."""

import contextlib

import aiohttp
import pytest
from aiohttp import web

from gateway.access.config import AuthConfig
from gateway.admission.buckets import Buckets
from gateway.admission.limits import RateLimits
from gateway.apis.arrivals import Arrivals
from gateway.apis.routes import RouteRoutes
from gateway.auth import ApiKeys
from gateway.config import GatewayConfig, HttpConfig, ModelConfig
from gateway.router.config import RouterConfig
from gateway.router.costs import WorkerLoad
from gateway.router.router import Router
from gateway.server import HttpServer
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.routing import StandingsCollector
from gateway.telemetry.stages import StageTimes
from gateway.turn import SessionRef, TurnError
from prefix_cache.events import Snapshot
from prefix_cache.hashing import block_digests, join_digests
from prefix_cache.index import ResidencyIndex
from sessions.identity import bounded_key, tenant_of

ROOT = bytes(16)


class Routed:
    def __init__(self, **config):
        self.now = 0.0
        self.metrics = GatewayMetrics()
        self.index = ResidencyIndex()
        self.router = Router(RouterConfig(**config), self.index, lambda: self.now, observer=self.metrics.routing)
        self.metrics.registry.register(StandingsCollector(self.router.standings, self.index))
        self.loads = [WorkerLoad(name, max_concurrency=8) for name in ("a", "b")]

    def turn(self, number, tenant="", session="s", **times):
        digests = block_digests(list(range(number * 1000, number * 1000 + 320)), ROOT, 16)
        self.index.apply("a", Snapshot("i", number, {"device": join_digests(digests[:10])}))
        route = self.router.route(
            digests=digests,
            prompt_tokens=330,
            block_size=16,
            session=SessionRef(tenant, session),
            loads=self.loads,
            request_id=f"r{number}",
        )
        if times:
            route.started(160, 0.5)
            self.now += times["first"]
            route.computed(160)
            route.finished(times["prefill"], 1.0)
        return route

    def samples(self):
        return {
            (sample.name.removeprefix("turnkeep_gateway_"), *sorted(sample.labels.values())): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
        }


@contextlib.asynccontextmanager
async def serving(log, keys=()):
    @web.middleware
    async def errors(request, handler):
        try:
            return await handler(request)
        except TurnError as error:
            return web.json_response({"code": error.code}, status=error.status)

    config = GatewayConfig(models=(ModelConfig("m", "."),), auth=AuthConfig(keys=tuple(keys)))
    app = web.Application(middlewares=[errors])
    RouteRoutes(log, Arrivals(config, ApiKeys(config.auth), RateLimits(Buckets()), StageTimes())).add_to(app.router)
    async with HttpServer(app, HttpConfig(port=0)) as server, aiohttp.ClientSession() as http:

        async def get(path, key=None):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with http.get(server.url + path, headers=headers) as response:
                return response.status, await response.json()

        yield get


async def test_a_receipt_has_candidates_terms_reason_and_outcome():
    routed = Routed(shadow_policy="round_robin")
    routed.turn(1, first=2.0, prefill=1.5)
    routed.turn(2)
    async with serving(routed.router.log) as get:
        status, body = await get("/v1/routes")
    assert status == 200
    assert [row["request"] for row in body["data"]] == ["r2", "r1"]
    first = body["data"][1]
    assert (first["worker"], first["reason"], first["prompt_tokens"], first["policy"]) == ("a", "prefix", 330, "prefix")
    rows = {row["worker"]: row for row in first["candidates"]}
    assert first["candidates"][0]["worker"] == "a"
    assert (rows["a"]["matched_tokens"], rows["b"]["matched_tokens"]) == (160, 0)
    assert rows["b"]["prefill_seconds"] > rows["a"]["prefill_seconds"] > 0
    terms = ("queue", "transfer", "prefill", "interference")
    assert first["estimated_seconds"] == pytest.approx(sum(rows["a"][f"{term}_seconds"] for term in terms), abs=1e-5)
    outcome = first["outcome"]
    assert (outcome["result"], outcome["cached_tokens"], outcome["queue_seconds"]) == ("finished", 160, 0.5)
    assert (outcome["time_to_first_token"], outcome["prefill_seconds"]) == (2.0, 1.5)
    other = sum(rows["b"][f"{term}_seconds"] for term in terms)
    assert outcome["regret_seconds"] == pytest.approx(2.0 - other, abs=1e-5)
    assert first["shadow"]["policy"] == "round_robin"
    assert body["data"][0]["outcome"] == {
        "result": "open",
        **dict.fromkeys(("cached_tokens", "queue_seconds", "prefill_seconds", "time_to_first_token", "regret_seconds")),
    }


async def test_metrics_add_up_what_receipts_say():
    routed = Routed(shadow_policy="longest_prefix")
    routes = [routed.turn(1, first=2.0, prefill=1.5), routed.turn(2)]
    routes[1].failed()
    seen = routed.samples()
    assert seen["route_outcomes_total", "finished"] == seen["route_outcomes_total", "failed"] == 1
    assert seen["route_observed_seconds_total",] == 2.0
    assert seen["route_estimated_seconds_total",] == pytest.approx(routes[0].receipt.seconds)
    assert seen["route_regret_seconds_sum",] == pytest.approx(routes[0].decision.outcome.regret)
    assert seen["route_shadow_total", "longest_prefix", "true"] == 2
    assert (
        seen["route_shadow_seconds_total", "live", "prefix"] == seen["route_shadow_seconds_total", "longest_prefix", "shadow"]
    )
    assert seen["worker_trust", "a"] == 2
    assert seen["worker_prefill_seconds_per_token", "a"] > 4e-5
    assert seen["index_distinct_blocks",] == len(routed.index)


async def test_everybody_sees_their_own_and_administrators_all():
    routed = Routed()
    mine, yours = tenant_of("mine"), tenant_of("yours")
    routed.turn(1, mine, "x")
    routed.turn(2, yours, "x")
    routed.turn(3, mine, "y")
    keys = ("mine", "yours", "root admin")
    async with serving(routed.router.log, keys) as get:

        async def requests(path, key):
            status, body = await get(path, key)
            return [row["request"] for row in body["data"]] if status == 200 else (status, body["code"])

        assert await requests("/v1/routes", "mine") == ["r3", "r1"]
        assert await requests("/v1/routes?session=x", "mine") == ["r1"]
        assert await requests("/v1/routes?session=x", "yours") == ["r2"]
        assert await requests("/v1/routes?request=r2", "mine") == []
        assert await requests("/v1/routes", None) == (401, "missing_api_key")
        for wanted in ("*", yours):
            assert await requests(f"/v1/routes?tenant={wanted}", "mine") == (403, "admin_only")
        assert await requests("/v1/routes?tenant=*&worker=a", "root") == ["r3", "r2", "r1"]
        assert await requests("/v1/routes?tenant=*&worker=b", "root") == []
        assert await requests(f"/v1/routes?tenant={yours}", "root") == ["r2"]
        for limit in ("0", "1001", "x", "-1", "٣"):
            assert await requests(f"/v1/routes?limit={limit}", "mine") == (400, "invalid_request")
        status, body = await get("/v1/routes?limit=1", "mine")
        assert (status, len(body["data"]), body["has_more"]) == (200, 1, True)


async def test_the_ring_is_bounded():
    routed = Routed(max_receipts=10)
    for number in range(50):
        routed.turn(number, first=0.1, prefill=0.05)
    assert len(routed.router.log) == 10
    assert [decision.request_id for decision in routed.router.log.newest()] == [f"r{n}" for n in range(49, 39, -1)]


async def test_a_session_is_asked_for_by_its_own_name_also_where_that_is_kept_as_a_digest():
    routed, name = Routed(), "n" * 200
    routed.turn(1, session=bounded_key(name))
    routed.turn(2, session="another")
    async with serving(routed.router.log) as get:
        _, body = await get("/v1/routes?session=" + name)
    assert [row["request"] for row in body["data"]] == ["r1"]
