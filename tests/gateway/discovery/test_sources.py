"""Files, names and services that say where workers are, and a fleet that follows them."""

import asyncio
import contextlib
import json
import socket

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
from aiohttp import web

from gateway.discovery.dns import DnsSource, LookUpError, addresses_of, targets_of
from gateway.discovery.file import FileSource, WorkersFileError, read_workers
from gateway.discovery.fleet import Fleet, FleetConfig
from gateway.discovery.kubernetes import KubernetesApi, KubernetesSource
from gateway.discovery.parse import parse_workers
from gateway.workers.spec import WorkerSpec
from gateway.workers.views import WorkerView

A, B = WorkerSpec("http://a:1"), WorkerSpec("http://b:2", "vllm")


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another party of the test
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def published(source):
    """All that a source publishes, while it runs."""
    seen = []
    task = asyncio.create_task(source.run(lambda workers: seen.append(dict(workers))))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# A file

GOOD = '[[worker]]\nname = "one"\nurl = "http://a:1"\n\n[[worker]]\nurl = "http://b:2"\nkind = "vllm"\nconcurrency = 8\n'


async def test_a_file_is_followed_and_a_damaged_one_changes_nothing(tmp_path, caplog):
    path = tmp_path / "workers.toml"
    async with published(FileSource(path, {}, poll_interval=0.005)) as seen:
        path.write_text(GOOD)
        await until(lambda: seen)
        assert seen == [{"one": WorkerSpec("http://a:1"), "1": WorkerSpec("http://b:2", "vllm", concurrency=8)}]
        path.write_text("[[worker]\n")
        await until(lambda: "not TOML" in caplog.text)
        path.unlink()
        fresh = tmp_path / "fresh"
        fresh.write_text('[[worker]]\nurl = "http://c:3"\n')
        fresh.rename(path)
        await until(lambda: len(seen) == 2)
        assert seen[1] == {"0": WorkerSpec("http://c:3")}
        path.write_text("")
        await until(lambda: len(seen) == 3)
        assert seen[2] == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker = 3", "worker is no list"),
        ("workers = []", "'workers' is not known"),
        ("worker = [3]", "worker 1 is no table"),
        ("[[worker]]\nkind = 'vllm'", "worker 1 has no url"),
        ("[[worker]]\nurl = 'http://a:1'\ncolour = 'red'", "'colour' is not known"),
        ("[[worker]]\nurl = 3", "url is 3"),
        ("[[worker]]\nurl = 'http://a:1'\nconcurrency = true", "concurrency is True"),
        ("[[worker]]\nurl = 'ftp://a'", "must be http"),
        ("[[worker]]\nurl = 'http://a:1'\nkey_env = 'NOPE'", "NOPE"),
        ("[[worker]]\nurl = 'http://a:1'\nname='x'\n[[worker]]\nurl = 'http://a:2'\nname='x'", "two workers are called 'x'"),
        ("\xff", "not TOML"),
    ],
)
def test_files_that_cannot_be_meant(tmp_path, text, says):
    path = tmp_path / "w.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(WorkersFileError, match=says):
        read_workers(path, {})


# DNS


class NameServer(asyncio.DatagramProtocol):
    """A small name server: answers SRV and A from `records`; `rcode` for all else, or for all while it is set."""

    def __init__(self):
        self.records, self.rcode, self.asked = {}, None, 0

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, peer):
        self.asked += 1
        query = dns.message.from_wire(data)
        question = query.question[0]
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA
        found = self.records.get((question.name.to_text().rstrip("."), dns.rdatatype.to_text(question.rdtype)))
        if self.rcode is not None:
            answer.set_rcode(self.rcode)
        elif found is None:
            known = any(name == question.name.to_text().rstrip(".") for name, _ in self.records)
            answer.set_rcode(dns.rcode.NOERROR if known else dns.rcode.NXDOMAIN)
        else:
            kind = dns.rdatatype.to_text(question.rdtype)
            answer.answer.append(dns.rrset.from_text_list(question.name, 1, "IN", kind, found))
        self.transport.sendto(answer.to_wire(), peer)


@pytest.fixture
async def name_server():
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    resolver.port = transport.get_extra_info("sockname")[1]
    resolver.lifetime = 1.0
    server.resolver = resolver
    yield server
    transport.close()


async def test_targets_of_a_service_are_looked_up_again(name_server, caplog):
    service = "_http._tcp.w.test"
    name_server.records = {
        (service, "SRV"): ["0 0 8000 one.test.", "0 0 8001 two.test."],
        ("one.test", "A"): ["10.0.0.1"],
        ("two.test", "A"): ["10.0.0.2", "10.0.0.3"],
    }
    spec = WorkerSpec("http://found.invalid:1", "vllm", "tcp://{host}:5557", "tcp://{host}:5558")
    source = DnsSource("srv", spec, targets_of(service, name_server.resolver), interval=0.01)
    async with published(source) as seen:
        await until(lambda: seen)
        assert sorted(seen[0]) == ["10.0.0.1:8000", "10.0.0.2:8001", "10.0.0.3:8001"]
        assert seen[0]["10.0.0.2:8001"] == WorkerSpec(
            "http://10.0.0.2:8001", "vllm", "tcp://10.0.0.2:5557", "tcp://10.0.0.2:5558"
        )
        name_server.records[("two.test", "A")] = ["10.0.0.9"]
        await until(lambda: sorted(seen[-1]) == ["10.0.0.1:8000", "10.0.0.9:8001"])
        name_server.rcode = dns.rcode.SERVFAIL
        await until(lambda: "are not looked up" in caplog.text)
        count = len(seen)
        asked = name_server.asked
        await until(lambda: name_server.asked > asked + 2)
        assert len(seen) == count
        name_server.rcode = dns.rcode.NXDOMAIN
        await until(lambda: seen[-1] == {})


async def test_addresses_of_a_host():
    assert ("127.0.0.1", 80) in await addresses_of("localhost", 80)()
    assert await addresses_of("127.0.0.1", 81)() == [("127.0.0.1", 81)]


async def test_a_resolver_that_fails_says_so(monkeypatch):
    loop = asyncio.get_running_loop()

    async def fails(*args, **kwargs):
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    monkeypatch.setattr(loop, "getaddrinfo", fails)
    with pytest.raises(LookUpError, match="try again"):
        await addresses_of("x", 1)()


# Kubernetes


class ApiServer:
    """A stand-in for the Kubernetes API server: lists and watches EndpointSlices over real HTTP, as its API says."""

    def __init__(self, token):
        self.token, self.slices, self.version = token, {}, 1
        self.watchers, self.lists, self.queries, self.fail, self.gone = [], 0, [], False, False

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/{ns}/endpointslices", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc):
        self.end_watches()
        await self._runner.cleanup()

    def end_watches(self):
        for queue in self.watchers:
            queue.put_nowait(None)

    def put(self, name, *addresses, kind="MODIFIED", port=8000, **conditions):
        self.version += 1
        body = {
            "metadata": {"name": name, "resourceVersion": str(self.version)},
            "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": port}],
            "endpoints": [{"addresses": [address], "conditions": conditions} for address in addresses],
        }
        if kind == "DELETED":
            self.slices.pop(name)
        else:
            self.slices[name] = body
        for queue in self.watchers:
            queue.put_nowait({"type": kind, "object": body})

    def say(self, change):
        for queue in self.watchers:
            queue.put_nowait(change)

    async def _answer(self, request):
        self.queries.append((request.match_info["ns"], dict(request.query)))
        if request.headers.get("Authorization") != f"Bearer {self.token}" or self.fail:
            return web.Response(status=503 if self.fail else 401)
        if "watch" not in request.query:
            self.lists += 1
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": list(self.slices.values())})
        if self.gone:
            self.gone = False
            return web.Response(status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        queue = asyncio.Queue()
        self.watchers.append(queue)
        try:
            while (change := await queue.get()) is not None:
                await response.write(change if isinstance(change, bytes) else json.dumps(change).encode() + b"\n")
        finally:
            self.watchers.remove(queue)
        return response


@pytest.fixture
async def api(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    async with ApiServer("secret") as server:
        yield server


@pytest.fixture
def source(api, tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.discovery.kubernetes._AGAIN", 0.01)
    monkeypatch.setattr("gateway.discovery.kubernetes._WATCH_AGAIN", 0.01)
    spec = WorkerSpec("http://found.invalid:1")
    return KubernetesSource("k8s", KubernetesApi(api.url, "prod", tmp_path / "token"), "workers", "http", spec)


async def test_endpoints_of_a_service_are_watched(api, source):
    api.put("s1", "10.1.0.1", "10.1.0.2", ready=True)
    async with published(source) as seen:
        await until(lambda: api.watchers)
        assert sorted(seen[0]) == ["10.1.0.1:8000", "10.1.0.2:8000"]
        assert seen[0]["10.1.0.1:8000"] == WorkerSpec("http://10.1.0.1:8000")
        api.put("s2", "10.1.0.3", port=8001)  # no word of readiness is readiness
        await until(lambda: "10.1.0.3:8001" in seen[-1])
        api.put("s1", "10.1.0.1", ready=False)
        await until(lambda: list(seen[-1]) == ["10.1.0.3:8001"])
        api.put("s1", "10.1.0.1", ready=True, terminating=True)
        api.put("s1", "fd00::1", ready=True)
        await until(lambda: "fd00::1:8000" in seen[-1])
        assert seen[-1]["fd00::1:8000"].url == "http://[fd00::1]:8000"
        api.put("s2", kind="DELETED")
        await until(lambda: list(seen[-1]) == ["fd00::1:8000"])
        assert api.lists == 1
        namespace, query = api.queries[0]
        assert (namespace, query["labelSelector"]) == ("prod", "kubernetes.io/service-name=workers")


async def test_a_watch_goes_on_from_where_it_was_and_a_lost_place_is_listed_anew(api, source):
    api.put("s1", "10.1.0.1")
    async with published(source) as seen:
        await until(lambda: api.watchers)
        api.say({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "77"}}})
        api.end_watches()
        await until(lambda: len(api.queries) >= 3 and api.watchers)
        assert api.queries[-1][1]["resourceVersion"] == "77"
        assert api.lists == 1
        api.gone = True
        api.slices["s1"]["endpoints"][0]["addresses"] = ["10.1.0.7"]
        api.end_watches()
        await until(lambda: list(seen[-1]) == ["10.1.0.7:8000"])
        assert api.lists == 2
        await until(lambda: api.watchers)
        api.say({"type": "ERROR", "object": {"code": 410}})
        await until(lambda: api.lists == 3)


@pytest.mark.parametrize("garbage", [b"{{{\n", b'{"type":"ADDED"}\n', b'{"type":"ADDED","object":[]}\n', b"[1]\n"])
async def test_trouble_with_the_api_server_changes_nothing(api, source, garbage, tmp_path, caplog):
    api.put("s1", "10.1.0.1")
    async with published(source) as seen:
        await until(lambda: api.watchers)
        api.fail = True
        api.say(garbage)
        await until(lambda: len(api.queries) > 5)
        assert seen[-1] == seen[0]
        assert "are not looked up" in caplog.text
        api.fail = False
        api.token = "renewed"
        (tmp_path / "token").write_text("renewed")
        await until(lambda: api.lists == 2)


def test_a_pod_knows_its_cluster(tmp_path):
    (tmp_path / "namespace").write_text("prod\n")
    made = KubernetesApi.in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}, tmp_path)
    assert (made.url, made.namespace, made.token_file) == ("https://10.0.0.1:6443", "prod", tmp_path / "token")
    with pytest.raises(ValueError, match="KUBERNETES_SERVICE_HOST"):
        KubernetesApi.in_cluster({}, tmp_path)


# What --worker says


def test_sources_as_text():
    assert parse_workers("vllm=http://a:1", {}) == WorkerSpec("http://a:1", "vllm")
    made = parse_workers("vllm=dns+https://workers:8000,events=tcp://{host}:5557", {})
    assert (made.name, made.kinds) == ("dns-workers:8000", {"vllm"})
    assert made._spec == WorkerSpec("https://found.invalid:1", "vllm", "tcp://{host}:5557")
    assert parse_workers("srv://_http._tcp.x", {}).name == "srv-_http._tcp.x"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dns://workers", "needs a port"),
        ("dns://workers:http", "is a number"),
        ("k8s://workers:http", "KUBERNETES_SERVICE_HOST"),
        ("vllm=dns://workers:1,colour=red", "'colour=red' is no option"),
        ("nope=dns://workers:1", "'nope' is not known"),
    ],
)
def test_sources_that_cannot_be_meant(text, says):
    with pytest.raises(ValueError, match=says):
        parse_workers(text, {})


# The fleet


class Dispatcher:
    """What a fleet needs of one."""

    def __init__(self):
        self.added, self.drained, self.in_flight = {}, set(), {}

    def add_worker(self, name, worker):
        self.added[name] = worker

    def remove_worker(self, name):
        self.added.pop(name, None)

    def drain(self, name, draining):
        if name not in self.added:
            return False
        (self.drained.add if draining else self.drained.discard)(name)
        return True

    def workers(self):
        return [
            WorkerView(name, spec.url, "ready", "", None, self.in_flight.get(name, 0), 0, 0, None)
            for name, spec in self.added.items()
        ]


class Source:
    kinds = frozenset({"turnkeep"})

    def __init__(self, name="s"):
        self.name, self.publish, self.runs = name, None, 0

    async def run(self, publish):
        self.publish = publish
        self.runs += 1
        if self.runs == 1:
            raise RuntimeError("the source is broken")
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def running(**config):
    dispatcher, source = Dispatcher(), Source()
    async with Fleet(FleetConfig(**{"restart_after": 0.001, **config}), dispatcher, [source]):
        await until(lambda: source.runs == 2)  # one that failed is run again
        yield dispatcher, source


async def test_workers_come_and_go():
    async with running() as (dispatcher, source):
        source.publish({"a": A, "b": B})
        assert dispatcher.added == {"s-a": A, "s-b": B}
        source.publish({"a": B})
        assert dispatcher.added["s-a"] == B
        await until(lambda: dispatcher.added == {"s-a": B})
        assert not dispatcher.drained


async def test_a_worker_that_goes_finishes_what_it_has():
    async with running() as (dispatcher, source):
        source.publish({"a": A})
        dispatcher.in_flight["s-a"] = 1
        source.publish({})
        assert dispatcher.drained == {"s-a"}
        await asyncio.sleep(0.25)
        assert "s-a" in dispatcher.added
        dispatcher.in_flight.clear()
        await until(lambda: not dispatcher.added)
        assert not dispatcher.drained


async def test_a_worker_that_comes_back_is_taken_back():
    async with running() as (dispatcher, source):
        source.publish({"a": A})
        dispatcher.in_flight["s-a"] = 1
        source.publish({})
        source.publish({"a": A})
        assert (dispatcher.added, dispatcher.drained) == ({"s-a": A}, set())
        dispatcher.in_flight.clear()
        await asyncio.sleep(0.25)
        assert dispatcher.added == {"s-a": A}


async def test_a_worker_that_does_not_finish_is_forgotten_all_the_same(caplog):
    async with running(drain_timeout=0.01) as (dispatcher, source):
        source.publish({"a": A})
        dispatcher.in_flight["s-a"] = 1
        source.publish({})
        await until(lambda: not dispatcher.added)
        assert "has not finished within" in caplog.text


async def test_there_is_a_bound(caplog):
    async with running(max_workers=2) as (dispatcher, source):
        source.publish({str(number): A for number in range(5)})
        assert len(dispatcher.added) == 2
        assert "discovery.max_workers" in caplog.text
