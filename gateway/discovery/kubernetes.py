"""Workers behind a Kubernetes Service: its EndpointSlices, listed and watched through the API server."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from yarl import URL

from gateway.discovery.dns import at_address
from gateway.discovery.fleet import Publish
from gateway.workers.base import WorkerError
from gateway.workers.lines import BodyLines
from gateway.workers.spec import WorkerSpec
from gateway.workers.transport import describe, read_reply

log = logging.getLogger(__name__)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LIST_BYTES = 64 * 2**20
_LINE_BYTES = 8 * 2**20
_WATCH_SECONDS = 240
_TIMEOUT = 15.0
_AGAIN = 2.0
_WATCH_AGAIN = 0.2


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """How to reach the API server. `token_file` is read for each request, as Kubernetes renews it."""

    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls, environ: Mapping[str, str], account: Path = _ACCOUNT) -> KubernetesApi:
        """As a pod reaches it, with its service account. Raises ValueError outside of a cluster."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("k8s= needs to run in a Kubernetes cluster: KUBERNETES_SERVICE_HOST is not set")
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise ValueError(f"the service account of the pod cannot be read: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", namespace, account / "token", account / "ca.crt")


class ApiError(Exception):
    """The API server did not do what it was asked."""


@dataclass(slots=True)
class _Slices:
    """EndpointSlices by name."""

    version: str = ""
    endpoints: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


class KubernetesSource:
    """Workers at the ready endpoints of `service`, on the port of this name or number. `spec` says what speaks there.

    An API server that cannot be reached changes nothing. A pod that terminates is no longer named, so that its worker is
    drained while it still finishes its streams.
    """

    def __init__(self, name: str, api: KubernetesApi, service: str, port: str, spec: WorkerSpec) -> None:
        self.name = name
        self.kinds: frozenset[str] = frozenset({spec.kind})
        self._api = api
        self._service = service
        self._port = port
        self._spec = spec

    async def run(self, publish: Publish) -> None:
        complained = False
        connector = aiohttp.TCPConnector(ssl=self._tls(), limit=4)
        async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as http:
            while True:
                try:
                    slices = await self._list(http)
                    complained = False
                    self._publish(publish, slices)
                    while await self._watch(http, slices, publish):  # noqa: ASYNC110 - it waits for the API server
                        await asyncio.sleep(_WATCH_AGAIN)
                except (ApiError, WorkerError, aiohttp.ClientError, OSError, TimeoutError) as error:
                    if not complained:
                        log.warning("workers of service %s are not looked up: %s", self._service, describe(error))
                    complained = True
                await asyncio.sleep(_AGAIN)

    def _tls(self) -> ssl.SSLContext | bool:
        return ssl.create_default_context(cafile=str(self._api.ca_file)) if self._api.ca_file is not None else True

    def _url(self, **query: str) -> URL:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._api.namespace}/endpointslices"
        return (
            URL(self._api.url).with_path(path).with_query(labelSelector=f"kubernetes.io/service-name={self._service}", **query)
        )

    async def _headers(self) -> dict[str, str]:
        if self._api.token_file is None:
            return {"Accept": "application/json"}
        token = (await asyncio.to_thread(self._api.token_file.read_text)).strip()
        return {"Accept": "application/json", "Authorization": f"Bearer {token}"}

    async def _list(self, http: aiohttp.ClientSession) -> _Slices:
        slices = _Slices()
        async with asyncio.timeout(_TIMEOUT):
            async with http.get(self._url(), headers=await self._headers()) as response:
                raw = await read_reply(response, _LIST_BYTES)
                if response.status != 200:
                    raise ApiError(f"the API server answers {response.status}: {raw[:200].decode('utf-8', 'replace')}")
        try:
            body = orjson.loads(raw)
            slices.version = str(body["metadata"]["resourceVersion"])
            for item in body["items"]:
                slices.endpoints[item["metadata"]["name"]] = self._endpoints(item)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ApiError(f"the API server's list of EndpointSlices makes no sense: {error!r}") from error
        return slices

    async def _watch(self, http: aiohttp.ClientSession, slices: _Slices, publish: Publish) -> bool:
        """Applies changes until the watch ends. False when it cannot go on from here: list anew. Raises what `run` handles."""
        url = self._url(
            watch="1", resourceVersion=slices.version, allowWatchBookmarks="true", timeoutSeconds=str(_WATCH_SECONDS)
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT, sock_read=_WATCH_SECONDS + _TIMEOUT)
        async with http.get(url, headers=await self._headers(), timeout=timeout) as response:
            if response.status == 410:
                return False
            if response.status != 200:
                raise ApiError(f"the API server answers {response.status} to a watch")
            lines = BodyLines(response, "the watch of EndpointSlices", _LINE_BYTES)
            while (line := await lines.read()) is not None:
                if not line.strip():
                    continue
                try:
                    change = orjson.loads(line)
                    kind, item = change["type"], change["object"]
                    if kind == "ERROR":
                        return False
                    slices.version = str(item["metadata"]["resourceVersion"])
                    if kind == "BOOKMARK":
                        continue
                    name = item["metadata"]["name"]
                    if kind == "DELETED":
                        slices.endpoints.pop(name, None)
                    else:
                        slices.endpoints[name] = self._endpoints(item)
                except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                    raise ApiError(f"a change of EndpointSlices makes no sense: {error!r}") from error
                self._publish(publish, slices)
        return True

    def _endpoints(self, item: Mapping[str, Any]) -> list[tuple[str, int]]:
        port = None
        for each in item.get("ports") or ():
            if self._port in (each.get("name"), str(each.get("port"))):
                port = each.get("port")
        if type(port) is not int:
            return []
        found = []
        for endpoint in item.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            # Absent means ready; a terminating pod may still serve, but nothing new is to go there.
            if conditions.get("ready") is False or conditions.get("terminating"):
                continue
            found += [(str(address), port) for address in endpoint.get("addresses") or ()]
        return found

    def _publish(self, publish: Publish, slices: _Slices) -> None:
        found = sorted({address for each in slices.endpoints.values() for address in each})
        publish({f"{host}:{port}": at_address(self._spec, host, port) for host, port in found})
