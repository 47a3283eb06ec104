"""The agent over real MCP servers, its model played by the fake server; and what it records can be replayed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from fake_openai_server import FakeServer

from traces.agent import Agent, AgentConfig, Step
from traces.chat_client import ChatClient, ChatError
from traces.index import expand_paths, index_files
from traces.record_samples import main, record
from traces.replay import open_http
from traces.sample_tasks import ANALYST, ENGINEER, TASKS
from traces.tool_host import ToolHost


def tool_results(body):
    return [message["content"] for message in body["messages"] if message["role"] == "tool"]


async def run(url, host, task, script=None, **config):
    config = AgentConfig("fake", "You help.", "agent-1", **config)
    async with open_http(1) as http:
        return [turn async for turn in Agent(ChatClient(http, url), host, config).run(task, script)]


async def test_a_free_run_ends_when_the_model_answers_in_words(tmp_path, serve):
    answers = iter(
        [
            (["Let me look."], [("list_tickets", "{}"), ("show_ticket", '{"number":2}')]),
            ([], [("show_ticket", '{"number":')]),
            ([], [("no_such_tool", "")]),
            (["It is ", "the stock."], []),
        ]
    )
    fake = FakeServer(answer=lambda body: next(answers))
    async with ToolHost(ENGINEER.servers(tmp_path)) as host:
        turns = await run(await serve(fake), host, "What is broken?", params={"temperature": 0})
        assert all(body["tools"] == host.tools for body in fake.bodies)
    assert [[use.name for use in turn.uses] for turn in turns] == [
        ["list_tickets", "show_ticket"],
        ["show_ticket"],
        ["no_such_tool"],
        [],
    ]
    assert fake.sessions == ["agent-1"] * 4
    assert [body["tool_choice"] for body in fake.bodies] == ["auto"] * 4
    assert [len(body["messages"]) for body in fake.bodies] == [2, 5, 7, 9]
    listed, shown, broken, unknown = tool_results(fake.bodies[-1])
    assert listed.startswith("#6 [normal, open] Wrong grind")
    assert shown.startswith("#2 Second line of an order lost in stock")
    assert broken.startswith("The arguments are no JSON object")
    assert unknown.startswith("There is no tool 'no_such_tool'")
    assert fake.bodies[1]["messages"][2]["content"] == "Let me look."
    assert turns[-1].message == {"role": "assistant", "content": "It is the stock."}
    assert not any(turn.scripted for turn in turns)
    assert turns[0].gap_seconds == 0
    assert turns[1].gap_seconds >= sum(use.seconds for use in turns[0].uses) > 0


async def test_a_free_run_is_bounded(tmp_path, serve):
    fake = FakeServer(answer=lambda body: ([], [("list_files", "{}")]))
    async with ToolHost(ENGINEER.servers(tmp_path)) as host:
        turns = await run(await serve(fake), host, "Go on for ever.", max_turns=3)
    assert len(turns) == 3


async def test_a_script_replaces_and_says_so(tmp_path, serve):
    def answer(body):
        choice = body["tool_choice"]
        if choice == "none":
            return ["words"], []
        name = choice["function"]["name"]
        return ([], [(name, '{"table":"customers"}')]) if name == "describe" else (["I would rather talk"], [])

    fake = FakeServer(answer=answer)
    script = [
        Step("describe"),
        Step("rows", {"table": "orders", "column": "state", "equals": "lost"}),
        Step(user="And now?"),
        Step("search", user="Look again."),
    ]
    async with ToolHost(ANALYST.servers(tmp_path)) as host:
        turns = await run(await serve(fake), host, "Which orders are lost?", script)
    assert [turn.scripted for turn in turns] == [("tool",), ("tool", "arguments"), (), ("tool", "arguments")]
    assert turns[0].uses[0].arguments == '{"table":"customers"}'
    assert turns[0].uses[0].result.text.startswith("customers: 12 rows")
    assert json.loads(turns[1].uses[0].arguments) == {"table": "orders", "column": "state", "equals": "lost"}
    assert "lost" in turns[1].uses[0].result.text
    assert turns[2].message == {"role": "assistant", "content": "words"}
    assert turns[3].uses[0].result.is_error  # search without its text
    roles = [message["role"] for message in fake.bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "user", "assistant", "user"]


async def test_a_model_that_fails_ends_the_run(tmp_path, serve):
    async with ToolHost(ENGINEER.servers(tmp_path)) as host:
        with pytest.raises(ChatError, match="the worker died"):
            await run(await serve(FakeServer(break_stream="error")), host, "x")


async def test_recording_a_session(tmp_path, serve):
    task = TASKS[0]
    fake = FakeServer(answer=lambda body: (["a", "b"], []))
    url = await serve(fake)
    async with open_http(1) as http:
        path = await record(http, url, "fake", task, tmp_path, api_key=None, max_tokens=48)
    (entry,) = index_files(expand_paths([tmp_path]))
    assert (path.name, entry.session, entry.turns) == ("engineer-shipping.jsonl", task.name, len(task.steps))
    turns = list(entry.read())
    assert [turn.messages for turn in turns] == [body["messages"] for body in fake.bodies]
    assert [list(turn.tools) for turn in turns] == [body["tools"] for body in fake.bodies]
    assert all(turn.line.keep is None for turn in turns)
    assert turns[3].line.scripted == ("tool", "arguments")
    assert turns[4].line.scripted == ()
    assert turns[4].line.assistant["content"] == "ab"
    assert turns[4].line.output_tokens == 2
    assert str(tmp_path) not in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_recording_says_what_is_wrong(tmp_path):
    for args, sentence in (
        (["--url", "http://127.0.0.1:9"], "cannot connect"),
        (["--url", "nowhere"], "is no URL of a server"),
        (["--url", "http://127.0.0.1:9", "--only", "x"], "there is no session x"),
    ):
        result = CliRunner().invoke(main, [*args, "--out", str(tmp_path / "out")])
        assert result.exit_code != 0
        assert sentence in result.output
