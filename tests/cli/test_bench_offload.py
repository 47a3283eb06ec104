"""`turnkeep bench offload` with the real model, as small as it goes: every figure is there and can be what it says it is."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.bench_offload import offload_command
from engine.checkpoints import DEFAULT_MODEL, CheckpointError, default_cache_dir, resolve


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


def test_traces_without_two_turns_are_refused(model, tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    result = CliRunner().invoke(offload_command, [str(tmp_path)])
    assert result.exit_code == 2
    assert "There is no session of two turns in these traces." in result.output
