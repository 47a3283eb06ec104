"""Workers that register themselves: a real gateway, and real replica processes that come, go, and die."""

import asyncio
import contextlib
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from test_sources import until

from cli.serving import ReplicaPlan, ServePlan, open_gateway
from gateway.config import GatewayConfig, HttpConfig, ModelConfig
from gateway.discovery.registration import Registration, RegistrationRoutes, Registry
from gateway.dispatch import PoolConfig
from gateway.turn import TurnError

TOKEN = "a-token-of-some-length"


@asynccontextmanager
async def gateway(smollm2_dir):
    plan = ServePlan(
        GatewayConfig(models=(ModelConfig("smol", smollm2_dir),), http=HttpConfig(port=0)),
        ReplicaPlan(0),
        pool=PoolConfig(models=("smol",), poll_interval=0.05),
        registration_token=TOKEN,
    )
    async with open_gateway(plan) as running, aiohttp.ClientSession() as http:
        yield running, http


@asynccontextmanager
async def replica(url, name, *options):
    command = [sys.executable, "-m", "cli.main", "engine", "--simulate", "--sim-tokens-from", "SmolLM2-135M-Instruct"]
    command += ["--model-name", "smol", "--port", "0", "--sim-time-scale", "0", "--register", url, "--register-token", TOKEN]
    process = await asyncio.create_subprocess_exec(
        *(*command, "--register-name", name, "--register-ttl", "3", *options), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def state(running, name):
    return next((view.state for view in running.workers() if view.name == f"registered-{name}"), None)


async def turn(running, http, **more):
    body = {"model": "smol", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
    async with http.post(running.url + "/v1/chat/completions", json=body) as response:
        return response.status, response.headers.get("X-Turnkeep-Replica")


async def test_replicas_register_serve_deregister_and_die(smollm2_dir):
    async with gateway(smollm2_dir) as (running, http):
        assert (await turn(running, http))[0] == 503
        async with replica(running.url, "one") as one, replica(running.url, "two") as two:
            await until(lambda: state(running, "one") == state(running, "two") == "ready", 60)
            status, worker = await turn(running, http)
            assert status == 200
            assert worker in ("registered-one", "registered-two")
            one.send_signal(signal.SIGTERM)
            assert await one.wait() == 0
            await until(lambda: state(running, "one") is None, 30)
            assert await turn(running, http) == (200, "registered-two")
            two.kill()  # it says nothing: its lease runs out
            await until(lambda: state(running, "two") == "down", 30)
            await until(lambda: state(running, "two") is None, 30)
        assert running.workers() == []


async def test_a_worker_that_goes_finishes_its_streams(smollm2_dir):
    async with gateway(smollm2_dir) as (running, http):
        options = ("--sim-time-scale", "1", "--sim-step", "0.02", "--sim-output-tokens", "0")
        async with replica(running.url, "slow", *options) as process:
            await until(lambda: state(running, "slow") == "ready", 60)
            body = {"model": "smol", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "stream": True}
            async with http.post(running.url + "/v1/chat/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                process.send_signal(signal.SIGTERM)
                rest = await response.content.read()
            assert rest.rstrip().endswith(b"data: [DONE]")
            assert b"error" not in rest
            assert await process.wait() == 0
            await until(lambda: state(running, "slow") is None, 30)


async def test_nobody_registers_without_the_token(smollm2_dir):
    async with gateway(smollm2_dir) as (running, http):
        url = running.url + "/workers/register"
        body = {"name": "x", "url": "http://127.0.0.1:9"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            async with http.post(url, json=body, headers=headers) as response:
                assert response.status == 401
            async with http.delete(url + "/x", headers=headers) as response:
                assert response.status == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for wrong, field in (
            ({"url": "http://a:1"}, "name"),
            ({**body, "name": "../x"}, "name"),
            ({**body, "url": "ftp://a"}, "url"),
            ({**body, "ttl": 0}, "ttl"),
            ({**body, "kind": "other"}, "kind"),
            ({**body, "events": "tcp://a:1"}, "url"),
        ):
            async with http.post(url, json=wrong, headers=headers) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, field), wrong
                assert field != "kind" or "choose one of turnkeep, vllm, sglang, openai" in error["message"]
        assert running.workers() == []
        async with http.post(url, json=body, headers=headers) as response:
            assert (response.status, await response.json()) == (200, {"name": "x", "ttl": 15.0})
        await until(lambda: state(running, "x") is not None)
        async with http.delete(url + "/x", headers=headers) as response:
            assert await response.json() == {"deregistered": True}
        await until(lambda: state(running, "x") is None)


async def test_leases_run_out_by_the_clock():
    now = [100.0]
    registry = Registry(max_workers=2, clock=lambda: now[0])
    seen = []
    task = asyncio.create_task(registry.run(lambda workers: seen.append(sorted(workers))))
    registry.register(Registration(name="a", url="http://a:1", ttl=10))
    registry.register(Registration(name="b", url="http://b:1", ttl=100))
    await until(lambda: seen == [["a", "b"]])
    with pytest.raises(TurnError) as caught:
        registry.register(Registration(name="c", url="http://c:1"))
    assert caught.value.status == 503
    now[0] += 9
    registry.register(Registration(name="a", url="http://a:1", ttl=10))  # again in time: nothing has changed
    now[0] += 9
    registry.register(Registration(name="b", url="http://b:1", ttl=100))
    await asyncio.sleep(0.01)
    assert seen == [["a", "b"]]
    now[0] += 2
    registry.register(Registration(name="b", url="http://b:1", ttl=100))
    await until(lambda: seen[-1] == ["b"])
    task.cancel()


def test_a_token_must_not_be_guessed():
    with pytest.raises(ValueError, match="at least 16"):
        RegistrationRoutes(Registry(), "short")
