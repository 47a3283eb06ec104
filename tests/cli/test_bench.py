"""`turnkeep bench engine` from end to end on a tiny checkpoint."""

import json
import sys

import pytest
from click.testing import CliRunner

from cli.main import cli as turnkeep


@pytest.fixture
def bench(model_cache_dir):
    """bench(*arguments) -> the result of the command."""

    def run(*arguments):
        return CliRunner().invoke(turnkeep, ["bench", "engine", "--cache-dir", str(model_cache_dir), *map(str, arguments)])

    return run


def said(result):
    assert result.exit_code != 0, result.output
    return " ".join(result.output.split())


def test_a_run_against_transformers(bench, tiny_checkpoint, tmp_path):
    figures = tmp_path / "figures.json"
    model = tiny_checkpoint("llama")
    arguments = ("--model", model, "--dtype", "float32", "--threads", 1, "--repeats", 2, "--json", figures)
    result = bench(*arguments, "--vs", "transformers", "--only", "prefill|decode 1 x 16|decode 16 x 128|16 seq")
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads(figures.read_text())
    assert report["settings"] == {
        "model": model.name,
        "dtype": "float32",
        "quantization": "none",
        "kv_dtype": "float32",
        "threads": 1,
        "max_num_batched_tokens": 512,
        "repeats": 2,
    }
    machine = report["machine"]
    assert machine["threads"] == 1
    assert machine["memory_bandwidth"] == machine["reads"][-1]["bandwidth"] > 0
    assert machine["matrix_rates"]["float32"] > 0
    assert report["peers"]["transformers"]["settings"] == {"dtype": "float32"}
    names = [row["work"] for row in report["rows"]]
    assert names == ["prefill 128", "decode 1 x 16", "decode 16 x 128", "16 sequences x 64", "mixed: 4 decoding, prefill 128"]
    for row in report["rows"]:
        assert len(row["rate"]["turns"]) == 2
        assert min(row["rate"]["turns"]) <= row["rate"]["median"] <= max(row["rate"]["turns"])
        assert row["seconds"] == pytest.approx(row["tokens"] / row["rate"]["median"])
        assert row["share"] == pytest.approx(row["rate"]["median"] / row["roofline"])
        assert 0 < row["share"] < 1
        assert row["foreign"] >= 0
        peer = row["peers"]["transformers"]
        assert peer["ratio"] == pytest.approx(row["rate"]["median"] / peer["median"])
        line = next(line for line in result.stdout.splitlines() if line.startswith(row["work"]))
        assert f"{row['rate']['median']:,.1f} ({row['rate']['spread']:.0%})" in line
        assert line.endswith(f"{peer['ratio']:.2f}")
        assert f"{row['work']}: turnkeep..." in result.stderr.splitlines()
    assert [overhead["batch"] for overhead in report["step_overhead"]] == [1, 16]
    for overhead in report["step_overhead"]:
        assert 0 < overhead["overhead"] < overhead["step"]
        assert f"step overhead, batch {overhead['batch']}: {overhead['overhead'] * 1e3:.2f} ms" in result.output


@pytest.mark.parametrize("name", ["openvino", "vllm"])
def test_a_peer_that_is_not_installed_is_refused_with_the_remedy(bench, tiny_checkpoint, name, tmp_path):
    bare = tmp_path / "python"  # sees no site-packages
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    directory = (tmp_path,) if name == "openvino" else ()
    message = said(bench("--model", tiny_checkpoint("llama"), "--vs", name, *directory, "--peer-python", f"{name}={bare}"))
    assert f"{name} cannot be imported by" in message
    assert f"--peer-python {name}=PATH" in message
    assert f"leave out --vs {name}." in message


def test_what_does_not_fit_together_is_refused(bench, tmp_path, tiny_checkpoint):
    model = ("--model", tiny_checkpoint("llama"))
    assert "Each --vs openvino takes one directory" in said(bench("--vs", "openvino"))
    assert "Each --vs openvino takes one directory" in said(bench("--vs", "transformers", tmp_path))
    (tmp_path / "notes.txt").touch()
    assert "neither a directory that optimum-cli exported nor a .gguf file" in said(
        bench("--vs", "openvino", tmp_path / "notes.txt")
    )
    assert "There are settings for vllm, but no --vs vllm." in said(bench("--peer-python", "vllm=/usr/bin/python3"))
    assert "--peer-option 'vllm=x' must be PEER:KEY=VALUE." in said(bench("--vs", "vllm", "--peer-option", "vllm=x"))
    assert "--peer-python 'vllm' must be PEER=PATH." in said(bench("--vs", "vllm", "--peer-python", "vllm"))
    assert "there is no directory '/no/where' to write it in" in said(bench("--json", "/no/where/figures.json"))
    assert "is found in the name of no work; they are: prefill 128, " in said(bench(*model, "--only", "training"))
    assert "which is no regular expression" in said(bench(*model, "--only", "("))
