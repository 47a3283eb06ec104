"""`turnkeep keys`: makes API keys, and the lines of a key file that let them in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gateway.access.entries import (
    PRIORITY_CLASSES,
    KeyEntry,
    checked_tenant,
    digest_of,
    format_entry,
    new_key,
    parse_entry,
    read_key_file,
)


def _entry_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--tenant", default=None, metavar="NAME", help="Keys of one tenant share sessions and their fair share."),
        click.option("--requests-per-minute", type=click.FloatRange(0), default=None, help="0: no limit."),
        click.option("--tokens-per-minute", type=click.FloatRange(0), default=None, help="0: no limit."),
        click.option(
            "--priority", type=click.Choice(PRIORITY_CLASSES), default="normal", help="The most urgent it may ask for."
        ),
        click.option("--admin", is_flag=True, help="It may administer the gateway."),
    ):
        command = option(command)
    return command


@click.group("keys")
def command() -> None:
    """Make API keys and see which a file has.

    \b
    turnkeep keys new --tenant research --file keys     prints a new key once, adds its hash to the file
    turnkeep serve --api-key-file keys                  lets it in; a gateway that runs reads the file again
    """


@command.command("new")
@_entry_options
@click.option("--file", type=click.Path(dir_okay=False, path_type=Path), help="Add the line to this key file.")
def new_command(file: Path | None, **options: Any) -> None:
    """Print a new key on standard output; it is shown this once. Its line goes into --file, else to standard error."""
    key = new_key()
    line = _line(key, options)
    if file is None:
        click.echo(f"# for the key file:\n{line}", err=True)
    else:
        _append(file, line)
        click.echo(f"Its hash was added to {file}.", err=True)
    click.echo(key)


@command.command("hash")
@_entry_options
def hash_command(**options: Any) -> None:
    """Read a key from standard input (or a prompt that shows nothing) and print its line for a key file."""
    key = click.prompt("Key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if not key or any(character.isspace() for character in key):
        raise click.ClickException("A key without spaces is expected on standard input.")
    click.echo(_line(key, options))


@command.command("list")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def list_command(file: Path) -> None:
    """Check a key file and show what its keys may do. Keys themselves are not shown."""
    try:
        entries = read_key_file(file)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    table = Table("hash", "tenant", "requests/min", "tokens/min", "priority", "admin")
    for entry in entries:
        table.add_row(
            entry.digest.hex()[:12],
            entry.tenant or "its own",
            _limit(entry.requests_per_minute),
            _limit(entry.tokens_per_minute),
            entry.priority,
            "yes" if entry.admin else "",
        )
    Console().print(table)


def _line(key: str, options: dict[str, Any]) -> str:
    try:
        if options["tenant"] is not None:
            checked_tenant(options["tenant"])
        line = format_entry(KeyEntry(digest_of(key), **options))
        parse_entry(line)
    except ValueError as error:
        raise click.ClickException(f"{error}.") from error
    return line


def _append(file: Path, line: str) -> None:
    """Adds a line, and makes the file readable to its owner only where it is new."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as stream:
            size = stream.seek(0, os.SEEK_END)
            if size:
                stream.seek(size - 1)
                line = line if stream.read(1) == b"\n" else "\n" + line
            stream.seek(0, os.SEEK_END)
            stream.write(line.encode() + b"\n")
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}.") from error


def _limit(value: float | None) -> str:
    if value is None:
        return "default"
    return "none" if value == 0 else f"{value:,.15g}"
