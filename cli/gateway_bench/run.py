"""One run: every side gets the same turn before any gets the next, so that whatever else the machine does meets all alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from cli.gateway_bench.load import Conversation, LoadConfig, LoadError, TurnMeasure, conversations, send
from cli.gateway_bench.report import SideReport
from cli.gateway_bench.sides import Side


async def run(config: LoadConfig, sides: Sequence[Side], progress: Callable[[int], None]) -> list[SideReport]:
    """Raises LoadError. Of one side's conversations `at_once` take a turn at the same time, then the next ones."""
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
                clock = time.perf_counter()
                for first in range(0, len(talk), config.at_once):
                    if config.pause:
                        await asyncio.sleep(config.pause)
                    report.turns += await _together(client, side, talk[first : first + config.at_once], config)
                report.seconds[turn] = time.perf_counter() - clock
                report.cpu[turn] = side.cpu_seconds() - began
        for side, report, start in zip(sides, reports, before, strict=True):
            report.stages = {name: seconds - start.get(name, 0.0) for name, seconds in (await side.stages(client)).items()}
            report.rss = side.rss()
    return reports


async def _together(
    client: aiohttp.ClientSession, side: Side, talks: Sequence[Conversation], config: LoadConfig
) -> list[TurnMeasure]:
    """One turn of each. When one fails, none is left running."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(client, side.url, side.model, talk, config)) for talk in talks]
    except* LoadError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
