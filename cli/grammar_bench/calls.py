"""Tool calls that the real model writes through the whole gateway, each validated against its full schema."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp

from cli.gateway_process import GatewayError, GatewayProcess, serve_command
from cli.grammar_bench.report import Batch, Call, CallsFile, CallsReport, judged, schemas_of
from grammar.tools import Tool

_ROWS = 64
"""Sequences that run at once: a step costs about the same for few of them."""
_MOST_CHOICES = 16
_FEW = 3
_LIST_EVERY = 4
"""Each request offers one tool, but every so many-th a few of them, of which two may be called."""
_MAX_TOKENS = 200
_TOKENS_CAP = 1600
_MOST_FAILURES = 50
_SAID_EVERY = 20.0
"""Seconds between words of progress where there is no terminal."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`count` finished calls, shared out evenly over `formats`, within `seconds`. `options`: of `turnkeep bench grammar`."""

    count: int
    temperature: float
    formats: tuple[str, ...]
    seconds: float
    options: dict[str, Any]


async def generate_calls(tools: Sequence[Tool], plan: Plan, console: Any) -> CallsReport:
    """Asks until every format has its share of finished calls. Every tool is offered alone, again and again, with more
    room each time. Raises GatewayError, OSError, and ValueError for a file of other calls."""
    report = CallsReport(plan.options["model"], plan.temperature, len(tools))
    file = CallsFile(plan.options["resume"], report)
    until = time.monotonic() + plan.seconds
    share = -(-plan.count // len(plan.formats))
    try:
        for form in plan.formats:
            if report.of(form).finished < share:
                await _Writing(tools, plan, form, share, until, report, file).run(console)
    finally:
        file.close()
    return report


class _Writing:
    """The calls of one format, with a gateway of its own."""

    def __init__(
        self,
        tools: Sequence[Tool],
        plan: Plan,
        form: str,
        share: int,
        until: float,
        report: CallsReport,
        file: CallsFile,
    ) -> None:
        self._tools = tools
        self._plan = plan
        self._form = form
        self._share = share
        self._until = until
        self._report = report
        self._file = file
        self._choices = min(_MOST_CHOICES, -(-share // len(tools)))
        self._numbers = iter(number for number in range(10**9) if (form, number) not in report.requests)
        self._said = time.monotonic()

    async def run(self, console: Any) -> None:
        options = self._plan.options
        command = ["--model", options["model"], "--cache-dir", str(options["cache_dir"].absolute()), "--log-level", "warning"]
        command += ["--tool-format", self._form, *options["serve_option"]]
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(GatewayProcess(serve_command(*command)))
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1200)))
            status = stack.enter_context(console.status(f"{self._form}: starting")) if console.is_terminal else None

            async def ask() -> None:
                while self._report.of(self._form).finished < self._share and time.monotonic() < self._until:
                    batch = await self._one(http, gateway.url, next(self._numbers))
                    self._report.add(batch)
                    self._file.add(batch)
                    if len(self._report.wrong) > _MOST_FAILURES:
                        raise GatewayError(f"Too many calls are wrong, the last with {self._report.wrong[-1]}")
                    self._say(console, status)

            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, _ROWS // self._choices)):
                    group.create_task(ask())

    def _say(self, console: Any, status: Any) -> None:
        count = self._report.of(self._form)
        words = f"{self._form}: {count.finished} of {self._share} calls, {count.cut} cut, {count.wrong} wrong"
        if status is not None:
            status.update(words)
        elif time.monotonic() - self._said > _SAID_EVERY:
            self._said = time.monotonic()
            console.print(words, markup=False, highlight=False)

    async def _one(self, http: aiohttp.ClientSession, url: str, number: int) -> Batch:
        tools = asked(self._tools, number)
        schemas = schemas_of(tools)
        passed = number // len(self._tools)
        body = {
            "messages": [{"role": "user", "content": "Do something with one of your tools."}],
            "tools": [{"type": "function", "function": _function(tool)} for tool in tools],
            "tool_choice": "required",
            "parallel_tool_calls": len(tools) > 1,
            "max_tool_calls": min(2, len(tools)),
            "temperature": self._plan.temperature,
            "n": self._choices,
            "max_tokens": min(_MAX_TOKENS << min(passed, 10), _TOKENS_CAP),
            "seed": number,
        }
        made = Batch(self._form, number, self._report.model, self._plan.temperature)
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            answer = json.loads(await response.read())
            if response.status != 200:
                names = ", ".join(schemas)
                refused = f"tools {names}: status {response.status}: {answer['error']['message']}"
                return Batch(made.format, number, made.model, made.temperature, refused=refused)
        warnings = " ".join(answer.get("warnings", ()))
        calls: list[Call] = []
        for choice in answer["choices"]:
            written = choice["message"].get("tool_calls") or []
            if choice["finish_reason"] == "length":
                calls.append(Call(written[-1]["function"]["name"] if written else "", "", "cut"))
                written = written[:-1]
            elif choice["finish_reason"] != "tool_calls":
                calls.append(
                    Call("", choice["message"]["content"] or "", "wrong", said=f"ended with {choice['finish_reason']}")
                )
            for call in written:
                function = call["function"]
                name = function["name"]
                warned = f"tool {name}:" in warnings
                calls.append(judged(name, function["arguments"], schemas.get(name, False), warned=warned))
        return Batch(made.format, number, made.model, made.temperature, tuple(calls))


def _function(tool: Tool) -> dict[str, Any]:
    # Without the tool's own description, which costs prompt tokens and says nothing of grammars.
    return {"name": tool.name, "parameters": tool.parameters or {"type": "object", "properties": {}}}


def asked(tools: Sequence[Tool], number: int) -> list[Tool]:
    """One tool, the next for each number; of every fourth number a few, with it among them."""
    return offered(tools, number, _FEW) if number % _LIST_EVERY == _LIST_EVERY - 1 else [tools[number % len(tools)]]


def offered(tools: Sequence[Tool], number: int, most: int = _FEW) -> list[Tool]:
    """A few tools of different names, other ones for each number."""
    found: dict[str, Tool] = {}
    for step in range(most * 4):
        tool = tools[(number + step * 13) % len(tools)]
        found.setdefault(tool.name, tool)
        if len(found) == most:
            break
    return list(found.values())
