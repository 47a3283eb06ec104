"""A model that is there is used as it is; one that can be had by its name is fetched; else a sentence says what to do."""

import io
import sys

import pytest
from rich.console import Console

import cli.model
from cli.model import fetch
from engine.checkpoints import CheckpointError


@pytest.fixture
def console():
    return Console(file=io.StringIO())


def test_a_directory_is_itself(tiny_checkpoint, tmp_path, console):
    directory = tiny_checkpoint("llama")
    assert fetch(str(directory), tmp_path, console) == directory


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "owner/model"])
def test_what_is_not_there_is_pulled_under_its_name_with_progress(name, tmp_path, console, monkeypatch):
    asked = []

    def pull(wanted, cache_dir, *, report, on_wait=None):
        asked.append((wanted, cache_dir))
        report("fetching", 5_000_000, 10_000_000)
        return tmp_path / "pulled"

    monkeypatch.setattr("engine.checkpoints.catalog.pull", pull)
    assert fetch(name, tmp_path, console) == tmp_path / "pulled"
    assert asked == [(name, tmp_path)]
    assert "fetching (10 MB)" in console.file.getvalue()


def test_a_name_that_says_nowhere_to_fetch_it_from_is_a_sentence(tmp_path, console, monkeypatch):
    monkeypatch.setattr("engine.checkpoints.catalog.pull", lambda *_, **__: pytest.fail("nothing can be pulled"))
    with pytest.raises(CheckpointError, match="no-such-model"):
        fetch("no-such-model", tmp_path, console)


def test_serve_and_engine_fetch(tmp_path, monkeypatch):
    """Both commands go through `fetch`: a hub that is not reached is their answer, in one sentence, not "pull it first"."""
    from click.testing import CliRunner

    from cli.main import cli as command

    def unreachable(name, cache_dir, console, **_):
        raise CheckpointError(f"{name} cannot be fetched: the hub is not reached.")

    monkeypatch.setattr(cli.model, "fetch", unreachable)
    monkeypatch.setattr("cli.serve.fetch", unreachable)
    # The command ends the process at once while threads of others run; here that would be the process of all tests.
    monkeypatch.setattr("os._exit", sys.exit)
    for arguments in (["serve", "--port", "0"], ["engine", "--port", "0"]):
        result = CliRunner().invoke(command, [*arguments, "--model", "owner/model", "--cache-dir", str(tmp_path)])
        assert result.exit_code == 1, result.output
        assert "the hub is not reached" in result.output
        assert "Traceback" not in result.output
