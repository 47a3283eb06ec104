"""`turnkeep bench grammar` with a small suite, and the reading of tools."""

import json
import subprocess
import sys

import pytest

from cli.grammar_bench.tools import ToolsError, of_size, read_tools

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
    done = subprocess.run([*command, "--list-size", "5", "--json", figures], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    written = json.loads(figures.read_text())
    (row,) = written["suite draft-x"]
    assert (row["keyword"], row["enforced"], row["checked"], row["refused"]) == ("minimum", 1, 1, 1)
    assert (row["invalid"], row["let_through"], row["valid"], row["not_written"]) == (1, 0, 1, 0)
    assert row["relaxed"] == {"not": 1}
    assert written["cost"]["tools"] == 5
    assert written["cost"]["tokens"] > 100
    assert 0 < written["cost"]["both_us_p50"] <= written["cost"]["both_us_p99"]
    assert "a list of 5 tools: first use" in done.stdout


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
