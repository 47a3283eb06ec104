"""`turnkeep bench`: measures what is installed here."""

from __future__ import annotations

import click

from cli.bench_engine import engine_command
from cli.bench_gateway import gateway_command
from cli.bench_grammar import grammar_command
from cli.bench_offload import offload_command
from cli.quality import quality_command


@click.group("bench")
def command() -> None:
    """Measure the engine, its tiers, the gateway and grammars on this machine."""


command.add_command(engine_command)
command.add_command(gateway_command)
command.add_command(grammar_command)
command.add_command(offload_command)
command.add_command(quality_command)
