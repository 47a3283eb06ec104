"""`turnkeep bench grammar` with a small suite, and the reading of tools."""

import json
import subprocess
import sys

import pytest

from cli.grammar_bench.calls import asked
from cli.grammar_bench.report import Batch, Call, CallsFile, CallsReport, judged
from cli.grammar_bench.tools import ToolsError, of_size, read_tools
from grammar.tools import Tool

GROUPS = [
    {
        "description": "integers",
        "schema": {"type": "integer", "minimum": 3},
        "tests": [
            {"description": "below", "data": 2, "valid": False},
            {"description": "above", "data": 4, "valid": True},
        ],
    },
    {"description": "not", "schema": {"not": {"type": "integer"}}, "tests": []},
    {"description": "nonsense", "schema": {"type": "dict"}, "tests": []},
]


def test_it_prints_and_writes_what_it_measured(smollm2_dir, tmp_path):
    suite, figures = tmp_path / "draft-x", tmp_path / "figures.json"
    suite.mkdir()
    (suite / "minimum.json").write_text(json.dumps(GROUPS))
    command = [sys.executable, "-m", "cli.main", "bench", "grammar", "--model", smollm2_dir, "--suite", suite]
    done = subprocess.run(
        [*command, "--list-size", "5", "--format", "glm", "--json", figures], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(figures.read_text())
    (row,) = written["suite draft-x"]
    assert (row["keyword"], row["enforced"], row["checked"], row["refused"]) == ("minimum", 1, 1, 1)
    assert (row["invalid"], row["let_through"], row["valid"], row["not_written"]) == (1, 0, 1, 0)
    assert row["relaxed"] == {"not": 1}
    assert written["cost"]["tools"] == 5
    assert written["cost"]["tokens"] > 100
    assert 0 < written["cost"]["both_us_p50"] <= written["cost"]["both_us_p99"]
    assert "a list of 5 tools, milliseconds at its first use and at its second" in done.stdout
    assert set(written["cost"]["formats"]) == {"glm"}
    assert all(one["first_ms"] > one["second_ms"] > 0 for one in written["cost"]["formats"].values())


def line(number, *calls, refused="", form="hermes"):
    return Batch(form, number, "m", 1.3, calls, refused)


def test_calls_are_counted_and_found_again(tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    valid, wrong = judged("t", '{"a": 1}', schema, warned=False), judged("t", "{}", schema, warned=False)
    checked, broken = judged("t", "{}", schema, warned=True), judged("t", "{", schema, warned=True)
    assert [call.outcome for call in (valid, wrong, checked, broken)] == ["valid", "wrong", "checked", "wrong"]
    path = tmp_path / "calls.jsonl"
    report = CallsReport("m", 1.3, 9)
    file = CallsFile(path, report)
    for batch in (line(0, valid, Call("t", "", "cut")), line(1, checked, wrong), line(0, refused="status 400", form="glm")):
        file.add(batch)
    file.close()
    path.write_bytes(path.read_bytes() + b'{"format": "hermes", "num')  # it was killed while it wrote
    again = CallsReport("m", 1.3, 9)
    CallsFile(path, again).close()
    assert again.requests == {("hermes", 0), ("hermes", 1), ("glm", 0)}
    count = again.of("hermes")
    assert (count.finished, count.cut, count.valid, count.checked, count.warned, count.wrong) == (3, 1, 1, 1, 1, 1)
    assert len(again.wrong) == 2
    assert again.called == {"t"}
    assert path.read_bytes().count(b"\n") == 3
    with pytest.raises(ValueError, match="another file"):
        CallsFile(path, CallsReport("m", 0.7, 9))
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1, is no record of calls"):
        CallsFile(path, CallsReport("m", 1.3, 9))


def test_every_tool_is_asked_for_alone_and_some_together():
    tools = [Tool(f"t{number}") for number in range(7)]
    lists = [[tool.name for tool in asked(tools, number)] for number in range(28)]
    assert {len(names) for names in lists} == {1, 3}
    assert {names[0] for names in lists if len(names) == 1} == {tool.name for tool in tools}
    assert all(len(set(names)) == len(names) for names in lists)


def test_tools_are_read_as_mcp_and_as_openai_write_them(tmp_path):
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    mcp = {"tools": [{"name": "a", "inputSchema": parameters}, {"name": "a", "inputSchema": parameters}]}
    (tmp_path / "mcp.json").write_text(json.dumps(mcp))
    (tmp_path / "openai.json").write_text(
        json.dumps([{"type": "function", "function": {"name": "b", "parameters": parameters}}])
    )
    tools = read_tools([tmp_path])
    assert [(tool.name, tool.parameters) for tool in tools] == [("a", parameters), ("b", parameters)]
    assert len({tool.name for tool in of_size(tools, 7)}) == 7
    assert len(read_tools([])) >= 10
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.json").write_text("{}")
    with pytest.raises(ToolsError, match="no tools"):
        read_tools([tmp_path / "none"])
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ToolsError, match="not valid JSON"):
        read_tools([tmp_path / "bad.json"])
