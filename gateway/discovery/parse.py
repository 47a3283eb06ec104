"""What `--worker` may say: one worker, or where to find several."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from gateway.discovery.dns import DnsSource, addresses_of, targets_of
from gateway.discovery.fleet import WorkerSource
from gateway.discovery.kubernetes import KubernetesApi, KubernetesSource
from gateway.workers.spec import PLACEHOLDER, WorkerSpec, parse_worker

_FOUND = re.compile(
    r"(?P<kind>[a-z0-9_-]+=)?(?P<how>dns|srv|k8s)(?P<tls>\+https)?://(?P<where>[^,/]+)/?(?P<options>,.*)?", re.DOTALL
)


def parse_workers(text: str, environ: Mapping[str, str]) -> WorkerSpec | WorkerSource:
    """[KIND=]URL[,OPTION=VALUE ...], where the URL may also be one of

        dns://HOST:PORT               every address of a host
        srv://_SERVICE._tcp.NAME      every target of a service
        k8s://SERVICE[.NAMESPACE]:PORT    every ready endpoint of a Kubernetes service; PORT by name or number

    with +https behind the first word where the workers speak TLS. Raises ValueError with a sentence.
    """
    match = _FOUND.fullmatch(text)
    if match is None:
        return parse_worker(text, environ)
    scheme = "https" if match["tls"] else "http"
    template = f"{match['kind'] or ''}{scheme}://{PLACEHOLDER}{match['options'] or ''}"
    spec, where = parse_worker(template, environ), match["where"]
    name = f"{match['how']}-{where}"
    if match["how"] == "srv":
        return DnsSource(name, spec, targets_of(where))
    host, colon, port = where.rpartition(":")
    if not colon or not host or not port:
        raise ValueError(f"worker {text}: {match['how']}:// needs a port: {match['how']}://{where}:8000")
    if match["how"] == "dns":
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"worker {text}: the port of dns:// is a number, not '{port}'")
        return DnsSource(name, spec, addresses_of(host.strip("[]"), int(port)))
    service, _, namespace = host.partition(".")
    api = KubernetesApi.in_cluster(environ)
    if namespace:
        api = dataclasses.replace(api, namespace=namespace)
    return KubernetesSource(name, api, service, port, spec)
