"""Options of `turnkeep engine` about the tiers below the device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from cli.sizes import MemorySize, fields_given
from offload.codecs import CODECS
from offload.config import REMOTE_SCHEMES, OffloadConfig

Command = Callable[..., Any]

_OPTIONS: tuple[Callable[[Command], Command], ...] = (
    click.option(
        "--host-kv-bytes",
        type=MemorySize(zero=True),
        default=None,
        help="Shared memory for KV blocks that the pool gives up, for all replicas of the model on this machine together "
        "(8GiB).",
    ),
    click.option(
        "--disk-kv-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=None,
        help="Keep KV blocks in this directory too; they outlive the replica.",
    ),
    click.option("--disk-kv-bytes", type=MemorySize(), default=None, help="What this model's blocks may take there. [8GiB]"),
    click.option(
        "--disk-kv-min-free", type=MemorySize(zero=True), default=None, help="What is left free on that file system. [1GiB]"
    ),
    click.option(
        "--kv-codec",
        type=click.Choice(CODECS),
        default="raw",
        show_default=True,
        help="How blocks are kept there: as they are, or in 8 bits, at some loss of precision.",
    ),
    click.option("--disk-kv-compress", is_flag=True, help="zstd around what is kept on disk."),
    click.option(
        "--remote-kv", default=None, metavar="URL", help="Keep KV blocks in this Redis too, for replicas of other machines."
    ),
    click.option("--remote-kv-bytes", type=MemorySize(), default=None, help="What this model's blocks may take there. [1GiB]"),
    click.option(
        "--kv-load",
        type=click.Choice(["faster", "always"]),
        default="faster",
        show_default=True,
        help="Load what is kept where that is faster than computing it, as measured; or always.",
    ),
)


def tier_options(command: Command) -> Command:
    """Adds them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_tiers(options: Mapping[str, Any]) -> None:
    """Raises UsageError for combinations that mean nothing."""
    for name in ("host_kv_bytes", "disk_kv_bytes", "disk_kv_min_free", "remote_kv_bytes"):
        if isinstance(options[name], float):
            raise click.UsageError(f"--{name.replace('_', '-')} is a number of bytes, not a share.")
    if options["remote_kv"] is not None and not options["remote_kv"].startswith(REMOTE_SCHEMES):
        raise click.UsageError("--remote-kv is the URL of a Redis: redis://HOST:PORT/DB, rediss://... or unix://PATH.")
    if options["disk_kv_compress"] and importlib.util.find_spec("zstandard") is None:
        raise click.UsageError("--disk-kv-compress needs the package zstandard: pip install 'turnkeep[zstd]', or leave it off.")
    if options["disk_kv_dir"] is None and (options["disk_kv_bytes"] is not None or options["disk_kv_compress"]):
        raise click.UsageError("Say with --disk-kv-dir where blocks are to be kept.")
    if any(options[name] is not None for name in ("host_kv_bytes", "disk_kv_dir", "remote_kv")):
        if options["simulate"] and (options["remote_kv"] or options["disk_kv_compress"] or options["kv_codec"] != "raw"):
            raise click.UsageError(
                "A simulated replica has host and disk tiers of made-up blocks; leave --remote-kv, --kv-codec and "
                "--disk-kv-compress out."
            )
        if options["no_prefix_caching"]:
            raise click.UsageError("Blocks are kept to be found again; leave --no-prefix-caching out.")


def offload_config(options: Mapping[str, Any]) -> OffloadConfig:
    """What they say."""
    directory = options["disk_kv_dir"]
    given = fields_given(options, disk_bytes="disk_kv_bytes", disk_min_free="disk_kv_min_free", remote_bytes="remote_kv_bytes")
    return OffloadConfig(
        host_bytes=options["host_kv_bytes"] or 0,
        disk=None if directory is None else directory.absolute(),
        codec=options["kv_codec"],
        compress=options["disk_kv_compress"],
        load=options["kv_load"],
        remote=options["remote_kv"],
        **given,
    )
