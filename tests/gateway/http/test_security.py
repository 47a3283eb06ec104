import asyncio
import contextlib
import hashlib
import json
import ssl

import aiohttp
import pytest
from aiohttp import web
from gateway_harness import run_gateway

from gateway.access.config import AuthConfig
from gateway.app import make_apps
from gateway.auth import ApiKeys
from gateway.certificate import TlsError
from gateway.config import GatewayConfig, HttpConfig, ModelConfig
from gateway.server import HttpServer
from gateway.turn import TurnError
from sessions.identity import tenant_of
from tests.certificates import needs_openssl, self_signed

USER = [{"role": "user", "content": "hi"}]


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def hashed(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


async def until(condition):
    while not (condition() if not asyncio.iscoroutinefunction(condition) else await condition()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_hashed_keys_let_in_and_keep_the_tenant_of_the_key():
    keys = ApiKeys(AuthConfig(keys=(hashed("one"), f"{hashed('two')},tenant=acme", "three tenant=acme")))
    assert keys.tenant(bearer("one")) == tenant_of("one")
    assert keys.tenant(bearer("two")) == keys.tenant(bearer("three")) == "@acme"
    for wrong in ("four", hashed("one"), ""):
        with pytest.raises(TurnError):
            keys.caller(bearer(wrong))
    # Names of keys tell two keys of a tenant apart, and say nothing about them.
    assert keys.caller(bearer("two")).key != keys.caller(bearer("three")).key
    assert hashlib.sha256(b"two").hexdigest()[:8] not in keys.caller(bearer("two")).key


def test_limits_of_a_key_go_before_those_of_the_gateway():
    config = AuthConfig(
        keys=("a", "b requests_per_minute=0", "c tokens_per_minute=7"), requests_per_minute=60, tokens_per_minute=1000
    )
    keys = ApiKeys(config)
    limits = [(c.requests_per_minute, c.tokens_per_minute) for c in map(keys.caller, map(bearer, "abc"))]
    assert limits == [(60, 1000), (0, 1000), (60, 7)]


async def test_a_key_file_that_changes_is_taken_over_and_a_broken_one_is_not(tiny_model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("gateway.auth._LOOK_EVERY", 0.05)
    path = tmp_path / "keys"
    path.write_text("one\n")
    async with run_gateway(tiny_model, auth={"key_file": path}) as gateway:

        async def status(key):
            async with gateway.http.get(gateway.url + "/v1/models", headers=bearer(key)) as response:
                return response.status

        assert (await status("one"), await status("two")) == (200, 401)
        path.write_text(hashed("two") + "\n")

        async def taken_over():
            return await status("two") == 200

        await until(taken_over)
        assert await status("one") == 401
        path.write_text("two secret-word\n")
        await until(lambda: "stay in force" in caplog.text)
        assert "secret-word" not in caplog.text
        path.unlink()
        await until(lambda: "is gone" in caplog.text)
        assert await status("two") == 200


async def test_administration_needs_an_admin_key_once_there_are_keys(tiny_model):
    async with run_gateway(tiny_model, api_keys=("user", "root admin")) as gateway:
        for path in ("/metrics", "/workers", "/v1/sessions?tenant=x"):
            for headers, status, code in (
                ({}, 401, "missing_api_key"),
                (bearer("user"), 403, "admin_only"),
                (bearer("root"), 200, None),
            ):
                async with gateway.http.get(gateway.url + path, headers=headers) as response:
                    assert response.status == status, (path, headers)
                    if code is not None:
                        error = (await response.json())["error"]
                        assert (error["code"], error["type"]) == (
                            code,
                            "authentication_error" if status == 401 else "permission_error",
                        )
    async with run_gateway(tiny_model, api_keys=("user",), auth={"open_metrics": True}) as gateway:
        async with gateway.http.get(gateway.url + "/metrics") as response:
            assert response.status == 200


async def test_administrators_see_the_sessions_of_a_tenant(tiny_model):
    async with run_gateway(tiny_model, api_keys=("user tenant=acme", "root admin")) as gateway:
        await gateway.chat(headers={**bearer("user"), "Session-ID": "s-1"})

        async def sessions(path, key):
            async with gateway.http.get(gateway.url + path, headers=bearer(key)) as response:
                return [session["id"] for session in (await response.json())["data"]]

        assert await sessions("/v1/sessions", "user") == ["s-1"]
        assert await sessions("/v1/sessions", "root") == []
        assert await sessions("/v1/sessions?tenant=@acme", "root") == ["s-1"]
        async with gateway.http.get(gateway.url + "/v1/sessions/s-1?tenant=@acme", headers=bearer("root")) as response:
            assert (await response.json())["turns"] == 1


class _Asked:
    """As much of a request as the check looks at."""

    def __init__(self, remote, headers=(), app=()):
        self.remote, self.headers, self.app = remote, dict(headers), dict(app)


@pytest.mark.parametrize(
    ("remote", "headers", "may"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        (None, {}, True),
        ("10.1.2.3", {}, False),
        ("::ffff:10.1.2.3", {}, False),
        ("fe80::1%eth0", {}, False),
        ("what", {}, False),
        # A web page in the browser of whoever sits at this machine.
        ("127.0.0.1", {"Origin": "https://evil.example"}, False),
    ],
)
def test_without_keys_only_this_machine_administers(remote, headers, may):
    keys = ApiKeys(AuthConfig())
    if may:
        keys.require_admin(_Asked(remote, headers))
    else:
        with pytest.raises(TurnError) as raised:
            keys.require_admin(_Asked(remote, headers))
        assert raised.value.status == 403


async def test_a_port_for_administration_asks_for_no_key(tiny_model):
    async with run_gateway(tiny_model, api_keys=("user",), auth={"admin_port": 0}) as gateway:
        await gateway.chat(headers={**bearer("user"), "Session-ID": "s"})
        config = GatewayConfig(models=(ModelConfig("tiny", tiny_model),), auth=AuthConfig(keys=("user",), admin_port=0))
        admin = make_apps(config, gateway.pipeline).administration
        async with HttpServer(admin, HttpConfig(port=0)) as server, aiohttp.ClientSession() as http:
            for path in ("/metrics", "/workers", f"/v1/sessions?tenant={tenant_of('user')}", "/health", "/ready"):
                async with http.get(server.url + path) as response:
                    assert response.status == 200, path
            for path in ("/v1/sessions", "/v1/sessions/s"):
                # Whose? No key says it here; that one is missing would be the wrong hint.
                async with http.get(server.url + path) as response:
                    assert response.status == 400, path
                    error = (await response.json())["error"]
                assert (error["code"], error["param"]) == ("missing_tenant", "tenant")
                assert "?tenant=ID" in error["message"]
            async with http.get(server.url + "/v1/sessions", headers=bearer("user")) as response:
                assert response.status == 200
            async with http.post(server.url + "/v1/chat/completions", json={"messages": USER}) as response:
                assert response.status == 404


async def test_pages_of_other_origins_get_nothing_unless_they_are_listed(tiny_model):
    origin = {"Origin": "https://app.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with run_gateway(tiny_model) as gateway:
        url = gateway.url + "/v1/chat/completions"
        async with gateway.http.options(url, headers=preflight) as response:
            assert response.status == 405
            assert not any(name.lower().startswith("access-control") for name in response.headers)
    async with run_gateway(tiny_model, cors_origins=("https://app.example",)) as gateway:
        url = gateway.url + "/v1/chat/completions"
        async with gateway.http.options(url, headers=preflight) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization"
        for stream in (False, True):
            async with gateway.http.post(url, json={"messages": USER, "stream": stream}, headers=origin) as response:
                assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
        async with gateway.http.post(url, json={}, headers=origin) as response:
            assert response.status == 400
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
        async with gateway.http.post(url, json={"messages": USER}, headers={"Origin": "https://evil.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
    with pytest.raises(ValueError, match="cors_origins"):
        HttpConfig(cors_origins=("app.example/",))


@contextlib.asynccontextmanager
async def served(**settings):
    async def echo(request):
        return web.json_response({"bytes": len(await request.read())})

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/", echo)
    async with HttpServer(app, HttpConfig(port=0, **settings)) as server:
        yield server


async def connected(server):
    return await asyncio.open_connection("127.0.0.1", server.port)


async def test_idle_connections_make_way_for_new_ones():
    async with served(max_connections=3) as server:
        idle = [await connected(server) for _ in range(3)]
        async with aiohttp.ClientSession() as http:
            async with http.post(server.url, data=b"abc") as response:
                assert await response.json() == {"bytes": 3}
        # The one that was idle for longest was closed.
        assert await idle[0][0].read() == b""
        assert (server.connections.evicted, server.connections.refused) == (1, 0)
        for _, writer in idle:
            writer.close()


async def test_clients_who_were_served_keep_their_connections_before_those_who_said_nothing():
    async with served(max_connections=4) as server:
        served_one, writer = await connected(server)
        request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        writer.write(request)
        assert b'{"bytes": 0}' in await served_one.readuntil(b"}")
        silent = [await connected(server) for _ in range(20)]
        await until(lambda: server.connections.evicted == 17)
        writer.write(request)
        assert b'{"bytes": 0}' in await served_one.readuntil(b"}")
        for _, other in (*silent, (served_one, writer)):
            other.close()


async def test_connections_in_use_are_never_closed_for_new_ones():
    async with served(max_connections=2) as server:
        busy = [await connected(server) for _ in range(2)]
        for _, writer in busy:
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
        await until(lambda: not server.connections._silent)
        reader, writer = await connected(server)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in answer
        assert b'"code":"too_many_connections"' in answer
        for reader, writer in busy:
            writer.write(b"cde")
            assert b'{"bytes": 5}' in await reader.readuntil(b"}")
            writer.close()
        await until(lambda: len(server.connections) == 0)


async def test_headers_that_never_end_are_cut_off():
    async with served(header_timeout=0.3) as server:
        silent, _ = await connected(server)
        slow, writer = await connected(server)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n")

        async def trickle():
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"a: b\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert await silent.read() == b""
        with contextlib.suppress(ConnectionError):
            assert await slow.read() == b""
        trickling.cancel()
        assert server.connections.slow == 2
        # The next request on a connection has as much time, counted from its first byte.
        reader, writer = await connected(server)
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            assert b'{"bytes": 0}' in await reader.readuntil(b"}")
            await asyncio.sleep(0.2)
        writer.write(b"POST")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert server.connections.slow == 3


async def test_headers_in_all_are_bounded_and_bodies_are_not_taken_for_headers():
    async with served(max_header_bytes=4096) as server:
        reader, writer = await connected(server)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"a%d: %s\r\n" % (n, b"x" * 100) for n in range(100)))
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"code":"headers_too_large"' in answer
        async with aiohttp.ClientSession() as http:
            for _ in range(20):
                async with http.post(server.url, data=bytes(500_000)) as response:
                    assert await response.json() == {"bytes": 500_000}
        await until(lambda: len(server.connections) == 0)


@pytest.mark.parametrize(
    ("header", "status", "code"),
    [
        (b"Session-ID: " + b"x" * 70_000, 431, "headers_too_large"),
        (b"Session-ID: a\x01b", 400, "malformed_request"),
        (b"no header at all", 400, "malformed_request"),
    ],
)
async def test_what_is_no_http_gets_an_error_like_any_other(header, status, code):
    async with served() as server:
        reader, writer = await connected(server)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n")
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        assert head.split()[1] == b"%d" % status
        assert b"Content-Type: application/json" in head
        error = json.loads(answer)["error"]
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
        assert len(error["message"]) < 300
        writer.close()


@needs_openssl
async def test_https_and_a_certificate_that_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.certificate._LOOK_EVERY", 0.05)
    self_signed(tmp_path, "first")

    async def subject(server):
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        writer.close()
        return dict(item[0] for item in writer.get_extra_info("peercert")["subject"])["commonName"]

    async with served(tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem")) as server:
        assert server.url.startswith("https://")
        assert await subject(server) == "first"
        good = (tmp_path / "cert.pem").read_text()
        (tmp_path / "cert.pem").write_text("nothing")
        await asyncio.sleep(0.2)
        (tmp_path / "cert.pem").write_text(good)
        assert await subject(server) == "first"
        self_signed(tmp_path, "second")
        while True:
            with contextlib.suppress(ssl.SSLError):
                if await subject(server) == "second":
                    break
            await asyncio.sleep(0.05)
        # Plain HTTP on this port gets nothing, and costs nothing.
        reader, writer = await connected(server)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"200" not in await reader.read()


async def test_a_certificate_that_cannot_be_used_is_a_sentence(tmp_path):
    (tmp_path / "cert.pem").write_text("nothing")
    with pytest.raises(TlsError, match="cannot be used"):
        async with served(tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem")):
            pass
    with pytest.raises(ValueError, match="go together"):
        HttpConfig(tls_cert="cert.pem")
