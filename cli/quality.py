"""`turnkeep bench quality`: what the formats of a model cost in quality, and which of them are ready to be served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cli.json_file import JSON_OPTION
from cli.model import CACHE_OPTION, fetch, own_name
from engine.checkpoints import DEFAULT_MODEL, CheckpointError
from engine.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from engine.quality.run import Verdict


@click.command("quality")
@click.option("--model", default=DEFAULT_MODEL, show_default=True, metavar="NAME|DIR|FILE.gguf", help="Fetched if need be.")
@CACHE_OPTION
@click.option(
    "--formats",
    default=None,
    metavar="NAME,...",
    help="Of bf16, int8, int4, gguf, kv-int8. [default: all that the model has]",
)
@click.option("--tokens", type=click.IntRange(64), default=None, help="Tokens of text at most. [default: 16384]")
@click.option("--threads", type=click.IntRange(1), default=None, help="Threads to compute with. [default: as torch finds]")
@click.option("--kernels", type=click.Choice(["auto", "reference"]), default="auto", show_default=True)
@JSON_OPTION
@click.pass_context
def quality_command(ctx: click.Context, /, **options: Any) -> None:
    """Print perplexity and greedy agreement of each format over a bundled text and recorded agent sessions.

    A format is READY when it is within its bounds, which are printed beside the figures; exit code 1 when one is not. bf16 is
    measured against float32, the others against bf16. docs/quality.md says what each column means.
    """
    console = Console(stderr=True)
    try:
        verdicts = _measure(options, console)
    except (CheckpointError, ConfigError) as error:
        raise click.ClickException(str(error)) from error
    _print(verdicts)
    if options["json_file"] is not None:
        found = [asdict(verdict) | {"ready": verdict.ready} for verdict in verdicts]
        options["json_file"].write_text(json.dumps(found, indent=1))
    ctx.exit(0 if all(verdict.ready for verdict in verdicts) else 1)


def _measure(options: dict[str, Any], console: Console) -> list[Verdict]:
    names = None if options["formats"] is None else [name.strip() for name in options["formats"].split(",") if name.strip()]
    cache_dir = options["cache_dir"].absolute()
    directory = fetch(options["model"], cache_dir, console, blocks=names is None or "gguf" in names)

    # Imports torch: after what can fail without it.
    from cli.quality_texts import texts_for
    from engine.quality import run
    from engine.quality.config import QualityConfig

    config = QualityConfig() if options["tokens"] is None else replace(QualityConfig(), max_tokens=options["tokens"])
    engine = EngineConfig(model=directory, threads=options["threads"], kernels=options["kernels"])
    texts = run.windows(texts_for(directory, own_name(options["model"], directory)), directory, config)
    console.print(f"Reading {sum(map(len, texts))} tokens in {len(texts)} texts with each format.", highlight=False)
    with _Bars(console) as bars:
        chosen = names or run.formats_of(directory, config)
        return list(run.measure(engine, chosen, texts, config, cache_dir=cache_dir, report=bars.report))


class _Bars:
    """A bar for each format on a terminal; elsewhere one line when it begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def report(self, name: str, done: int, total: int) -> None:
        """An `engine.quality.run.Report`."""
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
            if not self._console.is_terminal:
                self._console.print(f"{name}...", highlight=False)
        self._bars.update(self._tasks[name], completed=done)


def _print(verdicts: Sequence[Verdict]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("format", no_wrap=True)
    table.add_column("against", no_wrap=True)
    for header in ("perplexity", "ratio", "agreement", "divergence", "in decode", "logit error", "common prefix"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for verdict in verdicts:
        found, bounds = verdict.drift, verdict.bounds
        table.add_row(
            verdict.format,
            verdict.reference,
            f"{found.perplexity:.3f}",
            f"{found.perplexity_ratio:.4f} (<= {bounds.perplexity_ratio})",
            f"{found.agreement:.2%} (>= {bounds.agreement:.0%})",
            f"{found.divergence:.5f} (<= {bounds.divergence})",
            f"{found.decode_divergence:.5f}",
            f"{found.logit_error:.4f}",
            f"{found.common_prefix:.1f} of {found.generated}",
            "READY" if verdict.ready else "NOT READY",
        )
    console = Console()
    if not console.is_terminal:
        console.width = 4096
    console.print(table, highlight=False)
