"""`turnkeep bench quality` on a tiny model: table, JSON and exit code."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import engine.quality.config as quality_config
from cli.main import cli
from engine import loading
from engine.quality.config import Bounds

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture
def bench(tiny_checkpoint, tmp_path, monkeypatch):
    # The choices of a model of random weights are close: its bounds are wider than those of one that was trained.
    wide = {name: replace(made, bounds=Bounds(1.05, 0.85, 0.05)) for name, made in quality_config.FORMATS.items()}
    monkeypatch.setattr(quality_config, "FORMATS", wide)

    def invoke(*arguments):
        model = str(tiny_checkpoint("llama", **SHAPE))
        fixed = ["--model", model, "--cache-dir", str(tmp_path), "--tokens", "500", "--threads", "1", "--kernels", "reference"]
        return CliRunner().invoke(cli, ["bench", "quality", *fixed, *arguments])

    return invoke


def test_it_prints_a_row_and_a_verdict_for_each_format(bench, tmp_path):
    out = tmp_path / "figures.json"
    result = bench("--formats", "bf16, int4", "--json", str(out))
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == ["format", "bf16", "int4"]
    assert rows[1][-1] == "READY"
    figures = json.loads(out.read_text())
    assert [(entry["format"], entry["reference"]) for entry in figures] == [("bf16", "float32"), ("int4", "bf16")]
    for entry, row in zip(figures, rows[1:], strict=True):
        assert row[2] == f"{entry['drift']['perplexity']:.3f}"
        assert entry["ready"] == (entry["broken"] == []) == (row[-2:] != ["NOT", "READY"])
    assert result.exit_code == (0 if figures[1]["ready"] else 1)
    assert "Reading 500 tokens" in result.stderr
    assert "float32..." in result.stderr


def test_a_broken_format_is_not_ready_and_the_exit_code_says_so(bench, monkeypatch):
    load = loading.load_model

    def damaged(path, **settings):
        loaded = load(path, **settings)
        if settings["quantization"] == "int8":
            for layer in loaded.decoder.layers:
                layer.attention.out.quantized.scale.mul_(2)
        return loaded

    assert bench("--formats", "bf16,int8").exit_code == 0
    monkeypatch.setattr(loading, "load_model", damaged)
    result = bench("--formats", "bf16,int8")
    assert result.exit_code == 1
    assert [line.endswith("NOT READY") for line in map(str.rstrip, result.stdout.splitlines()[1:])] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--formats", "int3"), "no format int3"), (("--formats", "gguf"), "quantized.blocks"), (("--model", "x"), "x")],
)
def test_what_cannot_be_measured_is_a_sentence(bench, arguments, words):
    result = bench(*arguments)
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output
