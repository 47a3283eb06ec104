"""What options of the tiers mean something, and what is said of those that do not."""

import sys

import pytest
from click.testing import CliRunner

from cli import engine
from cli.sizes import MemorySize


def refused(*options):
    result = CliRunner().invoke(engine.command, options)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--remote-kv", "nonsense"], "--remote-kv is the URL of a Redis: redis://HOST:PORT/DB, rediss://... or unix://PATH."),
        (["--host-kv-bytes", "50%"], "--host-kv-bytes is a number of bytes, not a share."),
        (["--disk-kv-bytes", "1GiB"], "Say with --disk-kv-dir where blocks are to be kept."),
        (["--disk-kv-compress"], "Say with --disk-kv-dir where blocks are to be kept."),
        (["--disk-kv-dir", "d", "--disk-kv-bytes", "many"], "'many' is no size; write bytes with a unit"),
        (
            ["--host-kv-bytes", "1GiB", "--no-prefix-caching"],
            "Blocks are kept to be found again; leave --no-prefix-caching out.",
        ),
    ],
)
def test_options_that_mean_nothing_are_named_with_the_remedy(options, sentence):
    assert sentence in refused(*options)


def test_compression_without_its_package_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    said = refused("--disk-kv-dir", str(tmp_path), "--disk-kv-compress")
    assert "--disk-kv-compress needs the package zstandard: pip install 'turnkeep[zstd]', or leave it off." in said


def test_no_bytes_are_a_size_where_they_mean_something():
    assert MemorySize(zero=True).convert("0", None, None) == 0
    assert MemorySize(zero=True).convert("50%", None, None) == 0.5
