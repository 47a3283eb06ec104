"""A replica tells gateways that it is there, again and again, and that it goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp

logger = logging.getLogger(__name__)

_TIMEOUT = 5.0
_FAREWELL = 2.0
_AGAIN_FIRST, _AGAIN_MAX = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class RegistrationConfig:
    """`gateways`: base URLs. `url`: where the gateways reach this replica, by `name`, which is unique among their workers.
    `ttl`: seconds after which a gateway forgets it; it is told three times as often."""

    gateways: tuple[str, ...]
    token: str = field(repr=False)
    url: str
    name: str
    ttl: float = 15.0


class Registrar:
    """Registers with all gateways from `start` to `stop`. One that cannot be reached is tried again; the others do not wait."""

    def __init__(self, config: RegistrationConfig) -> None:
        self._config = config
        self._http: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.registered: set[str] = set()
        """Gateways that know of us."""

    async def start(self) -> None:
        """Begins in the background."""
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._config.token}"},
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._tasks = [asyncio.create_task(self._keep(self._http, gateway)) for gateway in self._config.gateways]

    async def stop(self) -> None:
        """Tells the gateways that it goes, so that they send nothing more; idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        http, self._http = self._http, None
        if http is not None:
            await self._farewell(http, sorted(self.registered))
            await http.close()

    async def _farewell(self, http: aiohttp.ClientSession, gateways: Sequence[str]) -> None:
        async def leave(gateway: str) -> None:
            url = f"{gateway}/workers/register/{quote(self._config.name, safe='')}"
            try:
                async with http.delete(url) as response:
                    await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                logger.warning("gateway %s was not told that this replica goes: %s", gateway, error)

        try:
            async with asyncio.timeout(_FAREWELL):
                await asyncio.gather(*(leave(gateway) for gateway in gateways))
        except TimeoutError:
            logger.warning("not all gateways were told in time that this replica goes")

    async def _keep(self, http: aiohttp.ClientSession, gateway: str) -> None:
        config, wait, complained = self._config, _AGAIN_FIRST, False
        body = {"name": config.name, "url": config.url, "ttl": config.ttl}
        while True:
            trouble = ""
            try:
                async with http.post(f"{gateway}/workers/register", json=body) as response:
                    said = (await response.content.read(500)).decode("utf-8", "replace")
                    if response.status != 200:
                        trouble = f"it answers {response.status}: {said}"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
            if not trouble:
                if gateway not in self.registered or complained:
                    logger.info("registered with %s as %s", gateway, config.name)
                self.registered.add(gateway)
                wait, complained = _AGAIN_FIRST, False
                await asyncio.sleep(config.ttl / 3)
                continue
            if not complained:
                logger.warning("registering with %s failed, and is tried again: %s", gateway, trouble)
                complained = True
            await asyncio.sleep(wait)
            wait = min(wait * 2, _AGAIN_MAX)
