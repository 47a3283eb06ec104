"""`turnkeep demo --quick`: an agent at work, two replays, one table, nothing left behind."""

import os
import subprocess
import sys

import psutil
import pytest


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_dir")
def test_the_demo_shows_an_agent_and_one_table_and_leaves_nothing_running():
    marker = f"demo-{os.getpid()}"
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "demo", "--quick"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "COLUMNS": "120", "DEMO_MARKER": marker},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("turns", "prompt tokens", "cached share", "TTFT p50", "TTFT p90", "TTFT p99", "ITL p50", "tokens/s", "goodput"):
        assert row in done.stdout
    assert "round robin" in done.stdout
    assert "prefix-aware" in done.stdout
    assert "→" in done.stdout, "no tool was called"

    def marked(process):
        try:
            return process.environ().get("DEMO_MARKER") == marker
        except psutil.Error:
            return False

    assert not [process for process in psutil.process_iter() if marked(process)]
