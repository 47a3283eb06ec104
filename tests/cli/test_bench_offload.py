"""`turnkeep bench offload`, as small as it goes: every figure is there and can be what it says it is."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.bench_offload import offload_command
from engine.checkpoints import DEFAULT_MODEL, CheckpointError, default_cache_dir, resolve
from tests.shared_data import shared_traces


@pytest.fixture
def model() -> str:
    try:
        resolve(DEFAULT_MODEL, default_cache_dir())
    except CheckpointError as error:
        pytest.skip(f"the model is not here: {error}")
    return DEFAULT_MODEL


def test_it_measures_rates_and_a_restart(model, tmp_path: Path):
    figures = tmp_path / "figures.json"
    what = ["--only", "rates", "--only", "restart", "--turn-tokens", "256", "--repeats", "1", "--rate-mib", "8"]
    arguments = [*what, "--directory", str(tmp_path), "--json", str(figures)]
    result = CliRunner().invoke(offload_command, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(figures.read_text())
    assert report["block_bytes"] in (368_640, 737_280)
    assert all(rate > 0 for rate in report["rates"].values())
    assert report["restart_cached"] == 240
    assert report["restart_loaded"] > 0
    assert report["restart_computed"] > 0
    assert "240 tokens loaded" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"], "it leaves nothing behind"


def test_it_measures_what_deciding_between_loading_and_computing_costs(model, tmp_path: Path):
    figures = tmp_path / "figures.json"
    what = ["--only", "worth", "--turn-tokens", "1536", "--repeats", "1", "--directory", str(tmp_path)]
    result = CliRunner().invoke(offload_command, [*what, "--json", str(figures)])
    assert result.exit_code == 0, result.output
    report = json.loads(figures.read_text())
    rows = {row["medium"]: row for row in report["worth"]}
    assert list(rows) == ["disk as it is", "as slow as computing", "four times as slow", "stands still now and then"]
    # Three sessions of three turns, the first ones of which have nothing to load.
    assert {row["turns"] for row in rows.values()} == {6}
    # What is not in the last turn's prompt, or not in a whole block, is computed whatever the disk does.
    assert 0.5 < rows["disk as it is"]["loaded_share"] <= (128 + 160) / (160 + 192)
    assert rows["four times as slow"]["loaded_share"] < rows["disk as it is"]["loaded_share"]
    targets = {target["name"]: target for target in report["targets"]}
    for name, row in rows.items():
        assert min(row["computing_a_block"], row["tiers_p50"], row["computed_p50"]) > 0
        target = targets[f"load or recompute, {name}: mean first token, of recomputing's"]
        assert target["value"] == pytest.approx(row["tiers_mean"] / row["computed_mean"])
        assert target["bound"] == 1.05
        assert target["at_most"]
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"], "it leaves nothing behind"


def test_traces_without_two_turns_are_refused(model, tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    result = CliRunner().invoke(offload_command, [str(tmp_path)])
    assert result.exit_code == 2
    assert "There is no session of two turns in these traces." in result.output


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint) -> str:
    return str(tiny_checkpoint("llama", max_position_embeddings=32_768))


SMALL = ["--sessions", "2", "--turns", "2", "--gap", "0.05", "--output", "2", "--turn-tokens", "128", "--repeats", "1"]


def bench(tmp_path: Path, *arguments: str):
    figures = tmp_path / "figures.json"
    result = CliRunner().invoke(offload_command, [*SMALL, "--rate-mib", "8", "--json", str(figures), *arguments])
    return result, json.loads(figures.read_text())


def test_it_prints_every_target_with_each_pool(tiny, tmp_path: Path):
    result, report = bench(tmp_path, "--model", tiny)
    assert result.exit_code == 0, result.output
    assert report["missing"] == {}
    names = [target["name"] for target in report["targets"]]
    assert len(names) == len(set(names)) == 2 + 1 + 1 + 4 + 2 + 8 + 1
    for target in report["targets"]:
        mark = "reached" if target["reached"] else "MISSED"
        assert f"{mark:8} {target['name']}" in result.output
    assert [row["share"] for row in report["pools"]] == [0.25, 0.25, 1.0, 1.0, 0.5, 0.5, 0.125, 0.125]
    assert {row["sessions"] for row in report["pools"]} == {2}
    assert {row["sessions"] for row in report["overload"]} == {4}
    unlimited = report["unlimited"]
    for row in (*report["pools"], *report["overload"], unlimited):
        assert 0 < row["first_token_p50"] <= row["first_token_p99"]
        assert row["mean_completion"] > 0
        # Sessions that begin alike at one time each compute what they share, so no side need compute more than another.
        assert row["computed_tokens"] > 0
        assert 0 <= row["others"] <= 1


def test_what_fails_takes_nothing_else_with_it(tiny, tmp_path: Path, monkeypatch):
    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.bench.offload.run.measure_rates", broken)
    result, report = bench(tmp_path, "--model", tiny, "--only", "rates", "--only", "restart")
    assert result.exit_code == 1
    assert "No space left on device" in report["missing"]["rates"]
    assert "rates: not all of it was measured" in result.output
    assert report["rates"] is None
    assert report["restart_loaded"] > 0


def test_what_finds_no_time_is_named(tiny, tmp_path: Path):
    result, report = bench(tmp_path, "--model", tiny, "--only", "pools", "--only", "overload", "--budget", "1", "--gap", "30")
    assert result.exit_code == 0, result.output
    assert set(report["missing"]) == {"pools", "overload"}
    assert "the budget was spent after" in report["missing"]["pools"]
    assert report["overload"] == []
    assert "targets" in report


def test_sessions_of_public_traces(tiny, tmp_path: Path):
    folder = shared_traces("tau_bench").parent
    traces = [str(folder / "tau_bench" / "gpt-4o-airline.json"), str(folder / "lmcache_agent_trace" / "miniswe")]
    result, report = bench(tmp_path, "--model", tiny, "--only", "pools", "--share", "0.5", *traces)
    assert result.exit_code == 0, result.output
    assert [row["side"] for row in report["pools"]] == ["tiers", "LRU, computed again"]
