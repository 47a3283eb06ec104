"""The bundled sessions over two replicas: what prefix-aware routing keeps of what one unlimited cache would give.

The replicas are simulated (cache accounting is the real block pool's, the tokenizer is the real one), so that this asks about
routing and not about the machine's speed; `turnkeep demo` does the same with the real model.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from live_gateway import serve

from cli.main import cli

BUNDLED = Path(__file__).parents[2] / "traces" / "bundled"


def replayed(smollm2_dir, policy):
    simulated = ("--simulate", "--engine", "sim-grammars=ignore")
    with serve(*simulated, "--replicas", 2, "--policy", policy, "--model", smollm2_dir) as served:
        arguments = ["replay", str(BUNDLED), "--url", served.url, "--gap-scale", "0", "--concurrency", "4", "--json", "-"]
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_bundle_is_what_it_is_said_to_be():
    files = sorted(BUNDLED.glob("*.jsonl"))
    assert len(files) >= 12
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(lines) >= 8
        calls = [line for line in lines if line["assistant"].get("tool_calls")]
        assert len(calls) >= 5
        for line in calls:
            assert "scripted" in line or line["params"]["tool_choice"] == "auto"
        results = [m for line in lines for m in line["messages"] if m["role"] == "tool"]
        assert all(m["content"] for m in results)
        assert len(results) >= len(calls) - 1


@pytest.mark.slow
def test_prefix_aware_routing_keeps_97_percent_of_what_one_unlimited_cache_gives(smollm2_dir):
    aware = replayed(smollm2_dir, "prefix")
    blind = replayed(smollm2_dir, "round_robin")
    print(
        f"share of one unlimited cache: prefix {aware['share_of_unlimited']:.1%}, round robin {blind['share_of_unlimited']:.1%}"
    )
    assert aware["completed"] == blind["completed"] >= 12 * 8
    assert aware["share_of_unlimited"] >= 0.97
    assert len(aware["turns_per_worker"]) == 2
    assert blind["share_of_unlimited"] < aware["share_of_unlimited"]
