"""One run: every side gets the same turn before any gets the next, so that whatever else the machine does meets all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import aiohttp

from cli.gateway_bench.load import LoadConfig, conversations, send
from cli.gateway_bench.report import SideReport
from cli.gateway_bench.sides import Side


async def run(config: LoadConfig, sides: Sequence[Side], progress: Callable[[int], None]) -> list[SideReport]:
    """Raises LoadError. Conversations of one side take their turns one by one: what is measured is work, not waiting."""
    reports = [SideReport(side.name, sessions=config.sessions, measured=side.pid is not None) for side in sides]
    talks = [conversations(config, side.name) for side in sides]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=300), read_bufsize=1 << 20
    ) as client:
        before = [await side.stages(client) for side in sides]
        for turn in range(1, config.turns + 1):
            progress(turn)
            for side, report, talk in zip(sides, reports, talks, strict=True):
                began = side.cpu_seconds()
                report.turns += [await send(client, side.url, side.model, one, config) for one in talk]
                report.cpu[turn] = side.cpu_seconds() - began
        for side, report, start in zip(sides, reports, before, strict=True):
            report.stages = {name: seconds - start.get(name, 0.0) for name, seconds in (await side.stages(client)).items()}
            report.rss = side.rss()
    return reports
