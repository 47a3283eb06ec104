"""The agent's side of the Model Context Protocol: several servers over stdio, their tools in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from mcp import Client, MCPError, StdioServerParameters
from mcp.types import TextContent

MAX_RESULT_CHARS = 20_000
MAX_TOOLS = 512


class ToolHostError(Exception):
    """A server that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to start one MCP server: its name in messages, and the command that speaks MCP on its standard streams."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returned, as the model reads it."""

    text: str
    is_error: bool


def _cause(error: Exception) -> str:
    """The sentence inside: task groups of the client wrap what went wrong in them."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return str(error) or ("it took too long" if isinstance(error, TimeoutError) else type(error).__name__)


class ToolHost:
    """Starts the servers when entered and ends them when left. Enter and leave in one task."""

    def __init__(self, servers: Sequence[ServerSpec], *, timeout: float = 60.0) -> None:
        self._servers = servers
        self._timeout = timeout
        self._stack = AsyncExitStack()
        self._clients: dict[str, Client] = {}
        self._tools: list[dict[str, Any]] = []

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of all servers, in the order the servers give them."""
        return self._tools

    async def __aenter__(self) -> Self:
        """Raises ToolHostError."""
        try:
            for spec in self._servers:
                await self._connect(spec)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _connect(self, spec: ServerSpec) -> None:
        parameters = StdioServerParameters(
            command=spec.command, args=list(spec.args), env=dict(spec.env) if spec.env is not None else None
        )
        try:
            async with asyncio.timeout(self._timeout):
                client = await self._stack.enter_async_context(Client(parameters, read_timeout_seconds=self._timeout))
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    for tool in page.tools:
                        self._add(spec, client, tool.name, tool.description, tool.input_schema)
                    cursor = page.next_cursor
                    if cursor is None:
                        return
        except (MCPError, OSError, TimeoutError, ExceptionGroup) as error:
            raise ToolHostError(f"The MCP server {spec.name!r} does not answer: {_cause(error)}.") from error

    def _add(self, spec: ServerSpec, client: Client, name: str, description: str | None, schema: Mapping[str, Any]) -> None:
        if name in self._clients:
            raise ToolHostError(f"Two MCP servers offer a tool {name!r}, the second is {spec.name!r}; start one of them.")
        if len(self._tools) >= MAX_TOOLS:
            raise ToolHostError(f"The MCP servers offer more than {MAX_TOOLS} tools.")
        self._clients[name] = client
        function = {"name": name, "description": (description or "").strip(), "parameters": dict(schema)}
        self._tools.append({"type": "function", "function": function})

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls a tool. What goes wrong is a result too: the model reads it and can do better."""
        client = self._clients.get(name)
        if client is None:
            return ToolResult(f"There is no tool {name!r}. Tools: {', '.join(self._clients)}.", is_error=True)
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            return ToolResult(f"The tool failed: {error}", is_error=True)
        text = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
        if len(text) > MAX_RESULT_CHARS:
            text = text[:MAX_RESULT_CHARS] + f"\n(cut after {MAX_RESULT_CHARS} characters)"
        return ToolResult(text, is_error=bool(result.is_error))
