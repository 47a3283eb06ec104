"""Workers behind a name: every address it has (A, AAAA), or every target of its service (SRV), looked up again and again."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gateway.discovery.fleet import Publish
from gateway.workers.spec import WorkerSpec

if TYPE_CHECKING:  # loading it takes a fifth of a second
    import dns.asyncresolver

log = logging.getLogger(__name__)

Address = tuple[str, int]
"""Host and port."""
Resolve = Callable[[], Awaitable[list[Address]]]
"""Every address now, in no order. Raises LookUpError when that cannot be said."""

_TIMEOUT = 5.0


class LookUpError(Exception):
    """The name server gave no answer; nothing follows from that."""


class DnsSource:
    """Workers at all addresses of a name. `spec` says what speaks there; its URL's host and port are replaced.

    A name server that does not answer changes nothing. A name that has no addresses has no workers.
    """

    def __init__(self, name: str, spec: WorkerSpec, resolve: Resolve, *, interval: float = 10.0) -> None:
        self.name = name
        self.kinds: frozenset[str] = frozenset({spec.kind})
        self._spec = spec
        self._resolve = resolve
        self._interval = interval

    async def run(self, publish: Publish) -> None:
        failing = False
        while True:
            try:
                found = sorted(set(await self._resolve()))
            except LookUpError as error:
                if not failing:
                    log.warning("workers of %s are not looked up: %s", self.name, error)
                failing = True
            else:
                failing = False
                publish({f"{host}:{port}": at_address(self._spec, host, port) for host, port in found})
            await asyncio.sleep(self._interval)


def at_address(spec: WorkerSpec, host: str, port: int) -> WorkerSpec:
    """What `spec` says, at this address. `{host}` in its event addresses stands for the host."""
    scheme = spec.url.split("://", 1)[0]
    shown = f"[{host}]" if ":" in host else host
    return dataclasses.replace(
        spec,
        url=f"{scheme}://{shown}:{port}",
        events=spec.events.replace("{host}", shown) if spec.events is not None else None,
        replay=spec.replay.replace("{host}", shown) if spec.replay is not None else None,
    )


def addresses_of(host: str, port: int) -> Resolve:
    """All addresses of a host, by the system's resolver (/etc/hosts and search domains included)."""

    async def resolve() -> list[Address]:
        try:
            async with asyncio.timeout(_TIMEOUT):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
                return []
            raise LookUpError(f"{host}: {error.strerror}") from error
        except (TimeoutError, OSError) as error:
            raise LookUpError(f"{host}: no answer within {_TIMEOUT:g} s") from error
        return [(str(ipaddress.ip_address(str(address[0]).split("%")[0])), port) for *_, address in found]

    return resolve


def targets_of(service: str, resolver: dns.asyncresolver.Resolver | None = None) -> Resolve:
    """The targets of an SRV record, such as `_http._tcp.workers.example.com`, each at all of its addresses."""
    import dns.asyncresolver
    import dns.exception
    import dns.resolver

    async def resolve() -> list[Address]:
        used = resolver if resolver is not None else dns.asyncresolver.Resolver()
        try:
            async with asyncio.timeout(_TIMEOUT):
                answer = await used.resolve(service, "SRV", search=True)
                found: list[Address] = []
                for record in answer:
                    host, port = str(record.target).rstrip("."), int(record.port)
                    addresses = await used.resolve_name(host)
                    found += [(str(address), port) for address in addresses.addresses()]
                return found
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except (dns.exception.DNSException, TimeoutError, OSError) as error:
            raise LookUpError(f"{service}: {error}") from error

    return resolve
