"""The processes of one gateway that share its port: what one is told, all do, and any of them can speak for all.

Each serves a unix socket in a directory that only their user can enter. There is no list of them: whoever has a socket there is
one. A peer that does not answer is about to be started again, and learns from the others what it missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
from aiohttp import web

log = logging.getLogger(__name__)

_PATTERN = "process-*.sock"
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """A worker is to be drained, or not any more."""

    worker: str
    draining: bool


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A worker has registered: JSON of `gateway.discovery.registration.Registration`."""

    registration: msgspec.Raw


class Deregister(msgspec.Struct, frozen=True, tag="deregister"):
    """A worker goes."""

    worker: str


class LocalWorkers(msgspec.Struct, frozen=True, tag="local_workers"):
    """The replicas on this machine, by name, as the process that looks after them has them: URLs."""

    urls: dict[str, str]


Word = Drain | Register | Deregister | LocalWorkers
"""What processes tell each other."""

_DECODER: msgspec.json.Decoder[Word] = msgspec.json.Decoder(Word)


class State(msgspec.Struct, frozen=True):
    """What a process that was started again has missed: workers that are drained, and those that take turns."""

    draining: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()


class Peers:
    """The other processes. Use on one event loop; `aclose` it."""

    def __init__(self, directory: Path, own: Path | None = None) -> None:
        """`own`: the socket of this process, None for one that is none of them."""
        self._directory = directory
        self._own = own
        self._telling: set[asyncio.Task[None]] = set()

    def sockets(self) -> list[Path]:
        """Of the others, in order."""
        return sorted(path for path in self._directory.glob(_PATTERN) if path != self._own)

    def tell(self, word: Word) -> None:
        """Tells all others, which takes a moment."""
        for socket in self.sockets():
            task = asyncio.ensure_future(self._tell_one(socket, word))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def tell_one(self, socket: Path, word: Word) -> bool:
        """Whether it was heard."""
        return await self._ask(socket, "/peer/tell", msgspec.json.encode(word)) is not None

    async def ask(self, path: str) -> list[bytes]:
        """What the others answer to GET `path`; those that do not are left out."""
        answers = await asyncio.gather(*(self._ask(socket, path) for socket in self.sockets()))
        return [answer for answer in answers if answer is not None]

    async def state(self) -> State:
        """What the others know that this process should."""
        draining: set[str] = set()
        ready: set[str] = set()
        for answer in await self.ask("/peer/state"):
            try:
                state = msgspec.json.decode(answer, type=State)
            except msgspec.DecodeError as error:
                log.warning("a process of this gateway says what is no state: %s", error)
                continue
            draining.update(state.draining)
            ready.update(state.ready)
        return State(tuple(sorted(draining)), tuple(sorted(ready)))

    async def is_ready(self, socket: Path) -> bool:
        """Whether a process has workers for every model."""
        return await self._ask(socket, "/ready") is not None

    async def aclose(self) -> None:
        """Waits for what is being told."""
        if self._telling:
            await asyncio.gather(*self._telling, return_exceptions=True)

    async def _tell_one(self, socket: Path, word: Word) -> None:
        if not await self.tell_one(socket, word):
            log.warning("process %s was not told of: %s", socket.stem, type(word).__name__)

    async def _ask(self, socket: Path, path: str, body: bytes | None = None) -> bytes | None:
        try:
            connector = aiohttp.UnixConnector(str(socket))
            async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as http:
                method = "GET" if body is None else "POST"
                async with http.request(method, f"http://peer{path}", data=body) as response:
                    return await response.read() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("process %s does not answer: %s", socket.stem, error)
            return None


class PeerRoutes:
    """What a process answers to its peers. `heard` is called with what it is told."""

    def __init__(
        self,
        *,
        heard: Callable[[Word], None],
        state: Callable[[], State],
        metrics: Callable[[], bytes],
        ready: Callable[[], Awaitable[Literal[True] | str]],
    ) -> None:
        self._heard = heard
        self._state = state
        self._metrics = metrics
        self._ready = ready

    def application(self) -> web.Application:
        """To be served on the unix socket alone: nobody is asked for a key there."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._is_ready)
        app.router.add_get("/metrics", self._own_metrics)
        app.router.add_get("/peer/state", self._own_state)
        app.router.add_post("/peer/tell", self._told)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _is_ready(self, request: web.Request) -> web.Response:
        answer = await self._ready()
        return web.json_response({"status": "ready"}) if answer is True else web.json_response({"why": answer}, status=503)

    async def _own_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), content_type="text/plain")

    async def _own_state(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._state()), content_type="application/json")

    async def _told(self, request: web.Request) -> web.Response:
        try:
            word = _DECODER.decode(await request.read())
        except msgspec.DecodeError as error:
            return web.json_response({"why": str(error)}, status=400)
        self._heard(word)
        return web.json_response({})
