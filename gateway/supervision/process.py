"""One life of one replica process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.supervision import launch
from gateway.supervision.death import Death
from gateway.workers.base import WorkerError
from gateway.workers.replica import ReplicaClient

log = logging.getLogger(__name__)

Forward = Callable[[str, str], None]
"""(name of the replica, a line that it printed)"""

_MAX_LINE = 16 * 1024
_PROBE_TIMEOUT = 2.0


class ReplicaProcess:
    """A replica from its start to its end. `launch`, then `until_ready`, then `wait`; `stop` at any time."""

    def __init__(self, name: str, socket: Path, stderr_lines: int, forward: Forward) -> None:
        self.name = name
        self.socket = socket
        self._forward = forward
        self._last_lines: deque[str] = deque(maxlen=stderr_lines)
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._began = time.monotonic()
        self._said_ready = asyncio.Event()
        self._reason: str | None = None

    @property
    def url(self) -> str:
        return f"unix:{self.socket}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def launch(self, command: Sequence[str], cores: Sequence[int] | None, given: bytes | None = None) -> None:
        """Starts it. Call from the main thread's event loop: the process dies with the thread that started it. `given`: what
        it reads from its standard input."""
        pinned = ",".join(map(str, cores)) if cores else "-"
        self._began = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), pinned, *command),
            stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # A session of its own: Ctrl-C reaches the supervisor alone, which then stops things in order.
            start_new_session=True,
        )
        if given is not None and self._process.stdin is not None:
            self._process.stdin.write(given)
            self._process.stdin.close()
        for stream, take in ((self._process.stdout, self._take_stdout), (self._process.stderr, self._take_stderr)):
            if stream is not None:
                self._readers.append(asyncio.create_task(_read_lines(stream, take)))

    async def until_ready(self, timeout: float, probe_interval: float) -> Death | None:
        """Waits until it answers /health. Returns how it died if it does so before, or takes longer than `timeout`."""
        client = ReplicaClient(self.url, connect_timeout=_PROBE_TIMEOUT, reply_timeout=_PROBE_TIMEOUT)
        ended = asyncio.ensure_future(self.wait())
        try:
            async with asyncio.timeout(timeout):
                while not ended.done():
                    if self.socket.exists() and await _is_healthy(client):
                        return None
                    self._said_ready.clear()
                    said = asyncio.ensure_future(self._said_ready.wait())
                    await asyncio.wait({ended, said}, timeout=probe_interval, return_when=asyncio.FIRST_COMPLETED)
                    said.cancel()
            return await ended
        except TimeoutError:
            self._reason = f"it was not ready within {timeout:g} s"
            await self.stop(0.0)
            return await ended
        finally:
            ended.cancel()
            await client.aclose()

    async def wait(self) -> Death:
        """Waits for its end; everything that it printed has been read by then."""
        process = self._process
        if process is None:
            return Death(None, 0.0, reason=self._reason)
        returncode = await process.wait()
        uptime = time.monotonic() - self._began
        # Grandchildren may hold the pipes open: what the replica itself had to say is there at once.
        await asyncio.wait(self._readers, timeout=1.0)
        return Death(returncode, uptime, tuple(self._last_lines), self._reason)

    async def stop(self, timeout: float) -> None:
        """SIGTERM, then after `timeout` seconds SIGKILL to it and its children; idempotent. Removes the socket."""
        process = self._process
        if process is not None and process.returncode is None:
            try:
                if timeout > 0:
                    _signal(process.pid, signal.SIGTERM)
                    async with asyncio.timeout(timeout):
                        await process.wait()
            except TimeoutError:
                log.warning("%s did not stop within %g s of SIGTERM; killing it", self.name, timeout)
            finally:
                if process.returncode is None:
                    _signal(-process.pid, signal.SIGKILL)
            await process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self.socket.unlink(missing_ok=True)

    def _take_stdout(self, line: str) -> None:
        if line.startswith("{"):
            try:
                said = json.loads(line)
            except ValueError:
                said = None
            if isinstance(said, dict) and said.get("event") == "ready":
                self._said_ready.set()
                return
        self._forward(self.name, line)

    def _take_stderr(self, line: str) -> None:
        self._last_lines.append(line[:1000])
        self._forward(self.name, line)


async def _is_healthy(client: ReplicaClient) -> bool:
    try:
        return await client.healthy() is None
    except WorkerError:
        return False


async def _read_lines(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    """Reads to the end, so that the process never waits for us; lines beyond `_MAX_LINE` bytes come in pieces."""
    partial = b""
    while data := await stream.read(65536):
        *lines, partial = (partial + data).split(b"\n")
        if len(partial) > _MAX_LINE:
            lines.append(partial)
            partial = b""
        for line in lines:
            take(line.decode("utf-8", "replace").rstrip("\r"))
    if partial:
        take(partial.decode("utf-8", "replace"))


def _signal(pid: int, number: signal.Signals) -> None:
    """To a process, or (negative) to a group. One that has gone already needs none."""
    try:
        if pid < 0:
            os.killpg(-pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        pass
