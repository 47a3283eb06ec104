"""`turnkeep bench gateway` against its own gateway and a stand-in for another router."""

import json
import socket
import subprocess
import sys

import pytest

from cli.gateway_bench.sides import cpu_seconds, foreign_side


@pytest.fixture
def stand_in():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.gateway_bench.backend", str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_measures_every_side(smollm2_dir, stand_in, tmp_path):
    url, _ = stand_in
    figures = tmp_path / "figures.json"
    options = ["--sessions", "2", "--turns", "4", "--words", "60", "--replicas", "1", "--vs", f"other={url}"]
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "bench", "gateway", "--model", smollm2_dir, *options, "--json", figures],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    own, other = json.loads(figures.read_text())
    assert (own["name"], other["name"]) == ("turnkeep", "other")
    assert own["turns"] == other["turns"] == 8
    assert set(own["stages_ms"]) == {"parse", "identity", "ledger", "route", "proxy"}
    assert 0 < own["cpu_ms"] < 1000
    assert own["cached_share"] > 0.5
    assert own["prompt_tokens_last"] > 240
    assert own["body_bytes_by_turn"]["1"] < own["body_bytes_by_turn"]["4"]
    assert other["cpu_ms"] > 0
    assert other["stages_ms"] == {}
    for word in ("turnkeep, ms by stage: parse", "other", "RSS MiB"):
        assert word in done.stdout


def test_a_side_is_known_by_who_listens(stand_in):
    url, pid = stand_in
    side = foreign_side(url)
    assert side.pid == pid
    assert side.rss() > 2**20
    assert cpu_seconds(pid) > 0
    with pytest.raises(ValueError, match="is no router"):
        foreign_side("localhost")
