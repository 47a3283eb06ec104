"""`turnkeep cache`: what lies in the tiers below the device, whether it is whole, and how it is made smaller."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console
from rich.table import Table

from cli.sizes import MemorySize
from offload.arena import SHARED_MEMORY
from offload.errors import TierUnavailable
from offload.inspection import HeldTier, Inspected, held_tiers
from offload.remote_inspection import held_remote
from prefix_cache.events import HOST

ResultT = TypeVar("ResultT")

DIRECTORY = click.option(
    "--disk-kv-dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="The directory that replicas were given; without it only shared memory is looked at.",
)
REMOTE = click.option(
    "--remote-kv", "remote", default=None, metavar="URL", help="The Redis that replicas were given; without it none is asked."
)
KEY = click.option("--key", default=None, metavar="KEY", help="Only the one whose key begins like this.")


@click.group("cache")
def command() -> None:
    """Show, verify, trim and clear the KV that is kept below the device. Replicas may use it meanwhile."""


@command.command("show")
@DIRECTORY
@REMOTE
@click.option("--json", "as_json", is_flag=True, help="One JSON value.")
def show(directory: Path | None, remote: str | None, as_json: bool) -> None:
    """What is kept, where, and who uses it."""
    found = [_doing(tier, lambda tier: tier.look()) for tier in _held(directory, remote)]
    # An arena does not know whose it is; what else is kept under its key does.
    models = {each.key: (each.model, each.codec) for each in found if each.model and each.tier != HOST}
    found = [each if each.model else _named(each, *models.get(each.key, ("", ""))) for each in found]
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found]))
        return
    if not found:
        places = [str(SHARED_MEMORY), *([str(directory)] if directory else []), *(["Redis"] if remote else [])]
        hint = "" if directory or remote else "; say --disk-kv-dir for disk, --remote-kv for Redis"
        click.echo(f"Nothing is kept in {' or '.join(places)}{hint}.")
        return
    table = Table("tier", "key", "model", "blocks", "GiB", "of", "used", "in use", box=None, pad_edge=False)
    for each in found:
        table.add_row(*_row(each))
    Console().print(table)


def _named(each: Inspected, model: str, codec: str) -> Inspected:
    return replace(each, model=model, codec=codec)


def _row(each: Inspected) -> tuple[str, ...]:
    ago = "" if each.last_use is None else f"{(time.time() - each.last_use) / 3600:.1f} h ago"
    return (
        each.tier,
        each.key[:12],
        f"{each.model} {each.codec}".strip() or "?",
        str(each.blocks),
        f"{each.used_bytes / 2**30:.2f}",
        f"{each.max_bytes / 2**30:.2f}",
        ago,
        "yes" if each.in_use else "no",
    )


@command.command("verify")
@DIRECTORY
@REMOTE
@KEY
@click.pass_context
def verify(ctx: click.Context, directory: Path | None, remote: str | None, key: str | None) -> None:
    """Read every block. Damaged ones are thrown away; exit code 1 when there were any."""
    damaged_in_all = 0
    for tier in _chosen(directory, remote, key):
        sound, damaged = _doing(tier, lambda tier: tier.verify())
        damaged_in_all += damaged
        click.echo(f"{tier.tier} {tier.key[:12]}: {sound} blocks are sound, {damaged} were damaged and are gone.")
    ctx.exit(1 if damaged_in_all else 0)


@command.command("trim")
@DIRECTORY
@REMOTE
@KEY
@click.option(
    "--to", "size", type=MemorySize(zero=True), required=True, help="What each may take then, bytes (4GiB) or a share (50%)."
)
def trim(directory: Path | None, remote: str | None, key: str | None, size: int | float) -> None:
    """Give up the blocks that are worth least, and what they take on disk."""
    for tier in _chosen(directory, remote, key):
        gone, left = _doing(tier, lambda tier: tier.trim(size))
        click.echo(f"{tier.tier} {tier.key[:12]}: {gone} blocks are gone, {left / 2**30:.2f} GiB are left.")


@command.command("clear")
@DIRECTORY
@REMOTE
@KEY
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(directory: Path | None, remote: str | None, key: str | None, yes: bool) -> None:
    """Give up everything."""
    tiers = _chosen(directory, remote, key)
    if tiers and not yes:
        click.confirm(f"Give up all blocks of {len(tiers)} {'tier' if len(tiers) == 1 else 'tiers'}?", abort=True)
    for tier in tiers:
        gone = _doing(tier, lambda tier: tier.clear())
        click.echo(f"{tier.tier} {tier.key[:12]}: {gone} blocks are gone.")


def _held(directory: Path | None, remote: str | None) -> list[HeldTier]:
    found: list[HeldTier] = list(held_tiers(directory))
    if remote is not None:
        try:
            found.extend(held_remote(remote))
        except TierUnavailable as error:
            raise click.ClickException(f"--remote-kv: {error}") from error
    return found


def _chosen(directory: Path | None, remote: str | None, key: str | None) -> list[HeldTier]:
    tiers = [tier for tier in _held(directory, remote) if key is None or tier.key.startswith(key)]
    if not tiers:
        raise click.ClickException("There is nothing of that kind; `turnkeep cache show` says what there is.")
    return tiers


def _doing(tier: HeldTier, work: Callable[[HeldTier], ResultT]) -> ResultT:
    try:
        return work(tier)
    except (TierUnavailable, OSError) as error:
        raise click.ClickException(f"{tier.tier} {tier.key[:12]}: {error}") from error
