"""An MCP agent through the gateway: the client of package `mcp`, servers over stdio, the real model, everything recorded."""

import itertools
import json

import aiohttp
import pytest

from traces.agent import Agent, AgentConfig
from traces.chat_client import ChatClient
from traces.sample_tasks import TASKS
from traces.tool_host import ToolHost


@pytest.mark.parametrize("task", TASKS[:1], ids=lambda task: task.name)
async def test_an_agent_works_with_real_tools_and_its_prefix_stays(stack, task, tmp_path):
    headers = {"Authorization": "Bearer sk-bob"}
    async with aiohttp.ClientSession(headers=headers) as http, ToolHost(task.kind.servers(tmp_path)) as host:
        config = AgentConfig(model="smollm2", system=task.kind.system, session="the-agent", max_tokens=40)
        agent = Agent(ChatClient(http, stack.url), host, config)
        turns = [turn async for turn in agent.run(task.task, task.steps[:6])]
    assert len(turns) == 6
    uses = [use for turn in turns for use in turn.uses]
    assert len(uses) >= 3
    for use in uses:
        assert not use.result.is_error, use
        assert use.result.text
        json.loads(use.arguments)
    assert len({turn.answer.worker for turn in turns}) == 1
    for before, turn in itertools.pairwise(turns):
        assert turn.answer.cached_tokens >= before.answer.prompt_tokens // 16 * 16 - 16
