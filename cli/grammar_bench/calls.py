"""Tool calls that the real model writes through the whole gateway, each validated against its full schema."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from cli.gateway_process import GatewayError, GatewayProcess, serve_command
from grammar.checking.validate import NotCheckable, violations
from grammar.tools import Tool

_CHOICES = 8
_SIDE_BY_SIDE = 3
_MAX_TOKENS = 240
_SHOWN_TOOLS = 3
NOTHING = {"type": "object", "additionalProperties": False}
"""What the arguments of a tool without parameters are."""


@dataclass(slots=True)
class CallsReport:
    """`finished` calls were not cut. `wrong`: those that neither validate nor carry a warning of what was not enforced."""

    model: str
    temperature: float
    tools: int
    finished: int = 0
    cut: int = 0
    parsed: int = 0
    valid: int = 0
    warned: int = 0
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def generate_calls(
    tools: Sequence[Tool], count: int, temperature: float, options: dict[str, Any], console: Any
) -> CallsReport:
    """Asks until `count` calls were finished: each request offers a few tools and requires a call. Raises GatewayError."""
    report = CallsReport(options["model"], temperature, len(tools))
    command = ["--model", options["model"], "--cache-dir", str(options["cache_dir"].absolute()), "--log-level", "warning"]
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(GatewayProcess(serve_command(*command, *options["serve_option"])))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)))
        status = stack.enter_context(console.status("Starting")) if console.is_terminal else None
        numbers = iter(range(10**9))
        until = time.monotonic() + options["seconds"]

        async def ask() -> None:
            while report.finished < count and time.monotonic() < until:
                number = next(numbers)
                await _one(http, gateway.url, offered(tools, number), temperature, number, report)
                if status is not None:
                    status.update(f"{report.finished} of {count} calls")

        await asyncio.gather(*(ask() for _ in range(_SIDE_BY_SIDE)))
    return report


def offered(tools: Sequence[Tool], number: int) -> list[Tool]:
    """A few tools of different names, other ones for each number."""
    offered: dict[str, Tool] = {}
    for step in range(_SHOWN_TOOLS * 4):
        tool = tools[(number * 7 + step * 13) % len(tools)]
        offered.setdefault(tool.name, tool)
        if len(offered) == _SHOWN_TOOLS:
            break
    return list(offered.values())


async def _one(
    http: aiohttp.ClientSession, url: str, tools: list[Tool], temperature: float, number: int, report: CallsReport
) -> None:
    # The model sees names only: long descriptions would cost prompt tokens and say nothing of grammars.
    functions = [{"name": tool.name, "parameters": tool.parameters or {"type": "object", "properties": {}}} for tool in tools]
    body = {
        "messages": [{"role": "user", "content": f"Do task {number} with one of your tools."}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": temperature,
        "n": _CHOICES,
        "max_tokens": _MAX_TOKENS,
        "seed": number,
    }
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = json.loads(await response.read())
        if response.status != 200:
            report.wrong.append(f"status {response.status}: {answer['error']['message']}")
            if len(report.wrong) > 50:
                raise GatewayError(f"Too many requests failed, the last with {report.wrong[-1]}")
            return
    warnings = " ".join(answer.get("warnings", ()))
    schemas = {tool.name: tool.parameters or NOTHING for tool in tools}
    for choice in answer["choices"]:
        if choice["finish_reason"] != "tool_calls":
            report.cut += 1
            continue
        for call in choice["message"]["tool_calls"]:
            name = call["function"]["name"]
            count_call(name, call["function"]["arguments"], schemas.get(name, False), f"tool {name}:" in warnings, report)


def count_call(name: str, arguments: str, schema: Any, warned: bool, report: CallsReport) -> None:
    """Counts one finished call. `warned`: the caller was told that keywords of its tool were not enforced."""
    report.finished += 1
    report.warned += warned
    try:
        json.loads(arguments)
        report.parsed += 1
        found = violations(schema, arguments)
    except (ValueError, NotCheckable) as error:
        report.wrong.append(f"{name}: {error}: {arguments[:200]}")
        return
    if not found:
        report.valid += 1
    elif not warned:
        report.wrong.append(f"{name}: {found[0]}: {arguments[:200]}")
