"""Stands in for `turnkeep serve`: the fake server behind the line that says where it listens, and a child of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from aiohttp import web
from fake_openai_server import FakeServer


def answer(body):
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        return [], [(choice["function"]["name"], "{}")]
    return ["w"] * body["max_tokens"], []


async def main(folder, mode):
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    (folder / f"{os.getpid()}.pids").write_text(f"{os.getpid()} {child.pid}")
    print("x" * 200_000)
    print("loading")
    if mode == "dies":
        print("no model here", file=sys.stderr)
        sys.exit(3)
    if mode == "hangs":
        await asyncio.Event().wait()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if mode == "stubborn":
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
    else:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    runner = web.AppRunner(FakeServer(answer=answer, break_stream="error" if mode == "broken" else None).app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"fake is ready at http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1", flush=True)
    await stop.wait()
    await runner.cleanup()
    if mode != "forgetful":
        child.kill()
        await child.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
