"""`turnkeep replay` from the outside: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from fake_openai_server import FakeServer
from trace_files import write_trace

from cli.main import cli


def invoke(*args):
    return CliRunner().invoke(cli, ["replay", *map(str, args)])


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "traces" / "t.jsonl"
    path.parent.mkdir()
    write_trace(path)
    return path


def test_a_table_and_figures(tmp_path, trace, serve_on_thread):
    url = serve_on_thread(FakeServer())
    figures = tmp_path / "figures.json"
    result = invoke(
        trace.parent, "--url", url + "/v1", "--goodput", "ttft:10000,tpot:10000", "--concurrency", 1, "--json", figures
    )
    assert result.exit_code == 0, result.output
    for row in ("turns", "cached share", "share of unlimited", "TTFT p99", "ITL p50", "goodput turns/s"):
        assert row in result.stdout
    values = json.loads(figures.read_text())
    assert (values["completed"], values["failed"], values["sessions"]) == (12, 0, 3)
    assert values["share_of_unlimited"] > 0.99
    assert values["request_goodput"] == values["request_throughput"] > 0


def test_json_on_standard_output_is_json_alone(trace, serve_on_thread):
    result = invoke(trace, "--url", serve_on_thread(FakeServer()), "--json", "-")
    assert json.loads(result.stdout)["completed"] == 12
    assert "TTFT p50" in result.stderr


def test_failures_end_with_status_1(trace, serve_on_thread):
    result = invoke(trace, "--url", serve_on_thread(FakeServer(break_stream="error")))
    assert result.exit_code == 1
    assert "session s0, turn 0: the stream ended with an error: the worker died" in result.stderr


def test_without_tokenize_there_is_no_bound(trace, serve_on_thread):
    result = invoke(trace, "--url", serve_on_thread(FakeServer(can_tokenize=False)))
    assert result.exit_code == 0
    sentence = "What one unlimited cache would give is not known: /tokenize: HTTP 404: no such endpoint"
    assert sentence in " ".join(result.stderr.split())
    assert "share of unlimited" not in result.stdout


@pytest.mark.parametrize(
    ("args", "status", "sentence"),
    [
        (["nowhere.jsonl"], 1, "Error: nowhere.jsonl: there is no such file"),
        (["{bad}"], 1, "field `turn`: object missing required field"),
        (["{trace}", "--url", "http://127.0.0.1:9"], 1, "cannot connect"),
        (["{trace}", "--url", "ftp://x"], 2, "is no URL of a server"),
        (["{trace}", "--goodput", "speed:1"], 2, "is no goodput limit"),
        (["{trace}", "--concurrency", "0"], 2, "0 is not in the range"),
        ([], 2, "Missing argument"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path, trace, args, status, sentence):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"v":1,"session":"s"}\n')
    result = invoke(*[arg.format(bad=bad, trace=trace) for arg in args])
    assert result.exit_code == status
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_figures_that_cannot_be_written(trace, serve_on_thread):
    result = invoke(trace, "--url", serve_on_thread(FakeServer()), "--json", "/nowhere/at/all.json")
    assert result.exit_code == 1
    assert "The figures cannot be written to /nowhere/at/all.json: No such file or directory." in result.stderr
