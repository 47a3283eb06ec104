"""A line between a gateway and a worker that can go dark: nothing arrives any more, and nobody is told. Half-open sockets."""

import asyncio
import contextlib


class Wire:
    """Listens on TCP and carries everything to a unix socket, until it is `dark`."""

    def __init__(self, socket):
        self._socket = socket
        self._lit = asyncio.Event()
        self._lit.set()
        self._tasks = set()
        self._server = None
        self.url = None

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def go_dark(self):
        """Connections stay, and new ones are taken; whatever is sent is lost in the ether."""
        self._lit.clear()

    def light(self):
        self._lit.set()

    async def _carry(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            await self._lit.wait()
            far_reader, far_writer = await asyncio.open_unix_connection(self._socket)
            pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, far_writer), (far_reader, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                far_writer.close()
        except OSError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pump(self, reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._lit.wait()
                writer.write(data)
                await writer.drain()
