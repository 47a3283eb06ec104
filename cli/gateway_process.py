"""`turnkeep serve` as a child process: started on a free port, waited for, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from gateway.supervision import launch

READY = re.compile(r" is ready at (?P<url>https?://\S+?)/v1\s*$")
MAX_LINE = 1 << 16
LINES_KEPT = 40


class GatewayError(Exception):
    """The gateway did not start, or ended on its own. The message has the last lines it printed."""


def serve_command(*options: str) -> list[str]:
    """The command line of `turnkeep serve` on a free port."""
    return [sys.executable, "-P", "-m", "cli.main", "serve", "--port", "0", *options]


class GatewayProcess:
    """Entered: running and ready. Left: ended, with its replicas. It dies with this process, however that ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_timeout: float = 120.0,
        stop_timeout: float = 20.0,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._command = command
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.ReadTransport | None = None
        self._reader: asyncio.Task[None] | None = None
        self._url: asyncio.Future[str] | None = None

    @property
    def url(self) -> str:
        """Base of its API. Raises GatewayError before it is ready."""
        if self._url is None or not self._url.done():
            raise GatewayError("The gateway is not ready.")
        return self._url.result()

    @property
    def pid(self) -> int:
        """Of the gateway's process. Raises GatewayError before it was started."""
        if self._process is None:
            raise GatewayError("The gateway was not started.")
        return self._process.pid

    async def __aenter__(self) -> Self:
        """Raises GatewayError when it does not become ready."""
        self._url = asyncio.get_running_loop().create_future()
        process, lines = await self._launch()
        self._reader = asyncio.create_task(self._read(lines))
        ended = asyncio.create_task(process.wait())
        waiting: set[asyncio.Future[Any]] = {self._url, ended}
        try:
            await asyncio.wait(waiting, timeout=self._start_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not self._url.done():
                raise await self._not_started(ended)
        except BaseException:
            await self._stop()
            raise
        finally:
            ended.cancel()
        return self

    async def _launch(self) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        """Starts the process and returns it and what it prints, on a pipe of our own.

        asyncio's own pipes would have `wait` wait for whoever else holds their other end, which a replica may.
        """
        loop = asyncio.get_running_loop()
        read_end, write_end = os.pipe()
        try:
            lines = asyncio.StreamReader(limit=MAX_LINE)
            pipe = os.fdopen(read_end, "rb")
            self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), pipe)
            # Standard input is closed and the session is its own, so that a Ctrl-C in the terminal reaches us alone and the
            # gateway is ended in order; launch.py has the kernel end it when we are killed.
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), "-", *self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                # Its console must not wrap the line that says where it listens.
                env={**os.environ, "COLUMNS": "1000"},
                start_new_session=True,
            )
        except BaseException:
            if self._transport is not None:
                self._transport.close()
            raise
        finally:
            os.close(write_end)
        return process, lines

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _not_started(self, ended: asyncio.Task[int]) -> GatewayError:
        if not ended.done():
            return GatewayError(self._with_lines(f"The gateway was not ready after {self._start_timeout:.0f} s."))
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=1.0)
        return GatewayError(self._with_lines(f"The gateway ended with status {ended.result()} before it was ready."))

    def _with_lines(self, sentence: str) -> str:
        return "\n".join([sentence, *(f"  {line}" for line in self._lines)])

    async def _read(self, lines: asyncio.StreamReader) -> None:
        while True:
            try:
                data = await lines.readline()
            except ValueError:
                continue  # a line longer than MAX_LINE; asyncio has dropped it
            if not data:
                return
            line = data.decode("utf-8", "replace").rstrip()
            self._lines.append(line)
            self._on_line(line)
            if self._url is not None and not self._url.done() and (ready := READY.search(line)):
                self._url.set_result(ready["url"])

    async def _stop(self) -> None:
        """SIGTERM, patience, then SIGKILL for all it started. Shielded: a second Ctrl-C must not leave replicas behind."""
        await asyncio.shield(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self._stop_timeout)
        except TimeoutError:
            pass
        # The session's processes share its group; none may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._transport is not None:
            self._transport.close()
