"""An agent: asks a model, does what it says with the tools of MCP servers, and asks again with the results.

It runs freely (the model chooses among the tools until it answers in words) or along a script. A script is for models too
small to plan: it names the tool of a turn, and where arguments cannot be chosen sensibly either, gives them. The model is
asked all the same and generates under the same constraints; what the script replaced is said in `AgentTurn.scripted`.
Tool results are always what the tools returned.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from traces.chat_client import Answer, ChatClient
from traces.format import ScriptedPart
from traces.tool_host import ToolHost, ToolResult


@dataclass(frozen=True, slots=True)
class Step:
    """One scripted turn. `user` is said before it. `tool` None: the model answers in words.

    `arguments` None: the model chooses them; else they take the place of the model's.
    """

    tool: str | None = None
    arguments: Mapping[str, Any] | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """`params` are further fields of every request (temperature, seed ...). `max_turns` bounds a free run."""

    model: str
    system: str
    session: str
    max_tokens: int = 64
    max_turns: int = 16
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One executed call. `arguments` is the JSON text the call was made with."""

    name: str
    arguments: str
    result: ToolResult
    seconds: float


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One turn as it happened: what was sent, what the model generated, what entered the history, what the tools said."""

    turn: int
    gap_seconds: float
    messages: list[dict[str, Any]]
    params: dict[str, Any]
    answer: Answer
    message: dict[str, Any]
    scripted: tuple[ScriptedPart, ...]
    uses: list[ToolUse]


class Agent:
    """One session of one agent."""

    def __init__(self, client: ChatClient, host: ToolHost, config: AgentConfig) -> None:
        self._client = client
        self._host = host
        self._config = config
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": config.system}]
        self._turn = 0
        self._ended: float | None = None

    async def run(self, task: str, script: Sequence[Step] | None = None) -> AsyncIterator[AgentTurn]:
        """Works on a task and yields each turn when its tools have answered. Raises ChatError when the model cannot be asked.

        Without a script it ends when the model calls no tool, or after `max_turns`; with one, at the script's end.
        """
        self._messages.append({"role": "user", "content": task})
        steps: Sequence[Step | None] = [None] * self._config.max_turns if script is None else script
        for step in steps:
            turn = await self._one_turn(step)
            yield turn
            if step is None and not turn.uses:
                return

    async def _one_turn(self, step: Step | None) -> AgentTurn:
        if step is not None and step.user is not None:
            self._messages.append({"role": "user", "content": step.user})
        sent = list(self._messages)
        params = self._params(step)
        body = {"model": self._config.model, "messages": sent, "tools": self._host.tools, **params}
        gap = 0.0 if self._ended is None else time.perf_counter() - self._ended
        answer = await self._client.chat(body, session=self._config.session)
        self._ended = time.perf_counter()
        message, scripted = _follow_script(answer.message, step, self._turn)
        self._messages.append(message)
        uses = [await self._use(call) for call in message.get("tool_calls", ())]
        turn = AgentTurn(self._turn, gap, sent, params, answer, message, scripted, uses)
        self._turn += 1
        return turn

    def _params(self, step: Step | None) -> dict[str, Any]:
        choice: Any = "auto"
        if step is not None:
            choice = "none" if step.tool is None else {"type": "function", "function": {"name": step.tool}}
        return {**self._config.params, "max_tokens": self._config.max_tokens, "tool_choice": choice}

    async def _use(self, call: dict[str, Any]) -> ToolUse:
        function = call["function"]
        started = time.perf_counter()
        try:
            arguments = msgspec.json.decode(function["arguments"] or "{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            result = ToolResult(f"The arguments are no JSON object: {error}", is_error=True)
        else:
            result = await self._host.call(function["name"], arguments)
        self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.text})
        return ToolUse(function["name"], function["arguments"], result, time.perf_counter() - started)


def _follow_script(generated: dict[str, Any], step: Step | None, turn: int) -> tuple[dict[str, Any], tuple[ScriptedPart, ...]]:
    """The message for the history: the model's, where a script does not say otherwise."""
    if step is None or step.tool is None:
        return {**generated, "content": generated.get("content") or ""}, ()
    calls = generated.get("tool_calls") or []
    if step.arguments is None and calls and calls[0]["function"]["name"] == step.tool:
        return generated, ("tool",)
    arguments = msgspec.json.encode(step.arguments or {}).decode()
    identifier = calls[0]["id"] if calls else f"call_{turn}"
    call = {"id": identifier, "type": "function", "function": {"name": step.tool, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}, ("tool", "arguments")
