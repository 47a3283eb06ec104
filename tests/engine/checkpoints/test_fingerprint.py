"""Fingerprints: equal for equal bytes, other for any other byte, remembered only for files that did not change."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoints import CheckpointError, fingerprint
from engine.checkpoints.fingerprint import file_digest, weights_fingerprint
from engine.models.registry import load_model


@pytest.fixture
def later(monkeypatch):
    """A clock ten seconds ahead: files just written count as settled."""
    real = fingerprint.time.time_ns
    monkeypatch.setattr(fingerprint.time, "time_ns", lambda: real() + 10 * 10**9)


@pytest.fixture
def reads(monkeypatch):
    """Names of files whose bytes were read."""
    seen = []
    real = fingerprint._hash
    monkeypatch.setattr(fingerprint, "_hash", lambda path, *rest: seen.append(path.name) or real(path, *rest))
    return seen


def test_a_digest_is_remembered_until_the_file_changes(tmp_path, later, reads):
    path, cache_dir = tmp_path / "a", tmp_path / "cache"
    path.write_bytes(b"weights")
    first = file_digest(path, cache_dir)
    assert file_digest(path, cache_dir) == first
    assert reads == ["a"]
    path.write_bytes(b"Weights")
    second = file_digest(path, cache_dir)
    assert second != first
    assert reads == ["a", "a"]


def test_a_change_that_keeps_size_and_modification_time_is_seen(tmp_path, later, reads):
    path, cache_dir = tmp_path / "a", tmp_path / "cache"
    path.write_bytes(b"weights")
    stat = path.stat()
    first = file_digest(path, cache_dir)
    path.write_bytes(b"Weights")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert file_digest(path, cache_dir) != first


def test_another_file_of_the_same_name_is_another(tmp_path, later, reads):
    path, cache_dir = tmp_path / "a", tmp_path / "cache"
    path.write_bytes(b"weights")
    first = file_digest(path, cache_dir)
    replacement = tmp_path / "b"
    replacement.write_bytes(b"Weights")
    os.replace(replacement, path)
    assert file_digest(path, cache_dir) != first


def test_a_fresh_file_is_not_remembered(tmp_path, reads):
    path, cache_dir = tmp_path / "a", tmp_path / "cache"
    path.write_bytes(b"weights")
    assert file_digest(path, cache_dir) == file_digest(path, cache_dir)
    assert reads == ["a", "a"]


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"digest": 1, "stamp": null}'])
def test_a_damaged_sidecar_is_read_over(tmp_path, later, reads, content):
    path, cache_dir = tmp_path / "a", tmp_path / "cache"
    path.write_bytes(b"weights")
    first = file_digest(path, cache_dir)
    (sidecar,) = (cache_dir / "fingerprints").iterdir()
    sidecar.write_bytes(content)
    assert file_digest(path, cache_dir) == first
    assert reads == ["a", "a"]


def test_a_cache_that_cannot_be_written_costs_a_read(tmp_path, later, reads):
    path, blocker = tmp_path / "a", tmp_path / "cache"
    path.write_bytes(b"weights")
    blocker.write_bytes(b"a file where the directory should be")
    assert file_digest(path, blocker) == file_digest(path, None)
    assert reads == ["a", "a"]


def test_the_number_of_sidecars_is_bounded(tmp_path, later, monkeypatch):
    monkeypatch.setattr(fingerprint, "_MAX_SIDECARS", 3)
    for index in range(6):
        path = tmp_path / f"file{index}"
        path.write_bytes(b"x")
        file_digest(path, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "fingerprints").iterdir())) == 3


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"weights")
    real = fingerprint._hash

    def meddle(target, *rest):
        digest = real(target, *rest)
        path.write_bytes(b"longer weights")
        return digest

    monkeypatch.setattr(fingerprint, "_hash", meddle)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        file_digest(path, None)


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        file_digest(tmp_path / "a", None)


def test_order_and_settings_count(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"a")
    b.write_bytes(b"b")
    digests = {
        weights_fingerprint(files, settings, None)
        for files, settings in [([a, b], b""), ([b, a], b""), ([a], b""), ([a, b], b"x")]
    }
    assert len(digests) == 4
    assert all(len(digest) == 32 for digest in digests)


def test_models_share_a_fingerprint_only_when_their_kv_is_the_same(tiny_checkpoint, tmp_path):
    original = tiny_checkpoint("llama")
    base = load_model(original, dtype=torch.float32).fingerprint

    def variant(name, change):
        directory = tmp_path / name / original.name  # one name for all of them
        shutil.copytree(original, directory)
        change(directory)
        return load_model(directory, dtype=torch.float32).fingerprint

    def config(**changes):
        def change(directory):
            path = directory / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return change

    def weight(directory):
        path = directory / "model.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"][5] += 1e-6
        save_file(tensors, path, {"format": "pt"})

    assert variant("copy", lambda directory: None) == base
    assert variant("eos", lambda directory: (directory / "generation_config.json").write_text('{"eos_token_id": 9}')) == base
    others = [
        variant("weight", weight),
        variant("eps", config(rms_norm_eps=2e-5)),
        variant("theta", config(rope_parameters={"rope_type": "default", "rope_theta": 999.0})),
        variant("scaling", config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})),
    ]
    assert len({base, *others}) == 5
    assert load_model(original, dtype=torch.bfloat16).fingerprint == base


def test_every_process_finds_the_same(tiny_checkpoint):
    directory = tiny_checkpoint("qwen3")
    script = (
        "import torch, sys; from pathlib import Path; from engine.models.registry import load_model;"
        "print(load_model(Path(sys.argv[1]), dtype=torch.float32).fingerprint)"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", script, str(directory)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert results == {load_model(directory, dtype=torch.float32).fingerprint}
