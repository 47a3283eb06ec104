"""`turnkeep bench engine`: how fast the engine is on this machine, beside what the machine can and what other engines reach."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.json_file import JSON_OPTION
from cli.model import CACHE_OPTION, fetch
from engine.checkpoints import DEFAULT_MODEL, CheckpointError
from engine.config import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from engine.bench.report import Report
    from engine.bench.session import Peer

PEERS = ("transformers", "openvino", "vllm")
_DISTURBED = 0.05
_FOREIGN = 0.15


@click.command("engine")
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--vs", multiple=True, type=click.Choice(PEERS), help="Another engine to take turns with; repeatable.")
@click.option(
    "--peer-python", multiple=True, metavar="PEER=PATH", help="The Python of the environment that a peer is in. [this one]"
)
@click.option(
    "--peer-option",
    multiple=True,
    metavar="PEER:KEY=VALUE",
    help="A setting of a peer, such as openvino:INFERENCE_PRECISION_HINT=f32; repeatable.",
)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, metavar="NAME|DIR|FILE.gguf", help="Fetched if need be.")
@CACHE_OPTION
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto", show_default=True)
@click.option("--quantization", type=click.Choice(["none", "int8", "int4", "gguf"]), default="none", show_default=True)
@click.option(
    "--kv-dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32", "int8"]), default="auto", show_default=True
)
@click.option("--threads", type=click.IntRange(1), default=None, help="For every side. [as torch finds]")
@click.option("--max-num-batched-tokens", type=click.IntRange(64), default=None, help="Tokens a step computes at most. [512]")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Turns that count; one more warms up.")
@click.option("--only", default="", metavar="PATTERN", help="Run the works in whose names this is found.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts, which are random token ids.")
@JSON_OPTION
def engine_command(**options: Any) -> None:
    """Print what the engine reaches here, its share of the roofline, and its ratio to other engines.

    --vs transformers, --vs openvino DIR (what optimum-cli exported, or a GGUF file) and --vs vllm take turns with it
    in this run, with the same threads, prompts and lengths, each in a process of its own. docs/benchmarks.md says what each row
    means.
    """
    from rich.console import Console

    logging.basicConfig(level="WARNING")
    peers = _peers(options)
    console = Console(stderr=True)
    try:
        blocks = options["quantization"] == "gguf"
        model = fetch(options["model"], options["cache_dir"].absolute(), console, blocks=blocks)
        # Imports torch.
        from engine.bench.session import BenchConfig, run_bench
        from engine.bench.sides import PeerError

        names = ("dtype", "quantization", "kv_dtype", "threads", "max_num_batched_tokens", "repeats", "only", "seed")
        config = BenchConfig(
            model=model,
            cache_dir=options["cache_dir"].absolute(),
            peers=peers,
            **{name: options[name] for name in names},
        )
        try:
            with _Progress(console) as progress:
                report = run_bench(config, progress.report)
        except PeerError as error:
            raise click.ClickException(str(error)) from error
    except (CheckpointError, ConfigError) as error:
        raise click.ClickException(str(error)) from error
    _show(report)
    if options["json_file"] is not None:
        options["json_file"].write_text(json.dumps(report.as_json(), indent=1) + "\n")


def _peers(options: dict[str, Any]) -> list[Peer]:
    """Raises UsageError."""
    directories = list(options["directories"])
    if len(directories) != options["vs"].count("openvino"):
        raise click.UsageError(
            "Each --vs openvino takes one directory that optimum-cli exported, or one GGUF file: --vs openvino DIR."
        )
    for path in directories:
        if not path.is_dir() and path.suffix != ".gguf":
            raise click.UsageError(f"--vs openvino {path}: neither a directory that optimum-cli exported nor a .gguf file.")
    pythons = dict(_pair(text, "--peer-python", "PEER=PATH") for text in options["peer_python"])
    settings: dict[str, dict[str, str]] = {}
    for text in options["peer_option"]:
        name, value = _pair(text, "--peer-option", "PEER:KEY=VALUE")
        peer, colon, key = name.partition(":")
        if not colon:
            raise click.UsageError(f"--peer-option {text!r} must be PEER:KEY=VALUE.")
        settings.setdefault(peer, {})[key] = value
    for name in (*pythons, *settings):
        if name not in options["vs"]:
            raise click.UsageError(f"There are settings for {name}, but no --vs {name}.")
    from engine.bench.session import Peer  # imports torch

    return [
        Peer(kind, directories.pop(0) if kind == "openvino" else None, pythons.get(kind), settings.get(kind, {}))
        for kind in options["vs"]
    ]


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise click.UsageError(f"{option} {text!r} must be {form}.")
    return name, value


class _Progress:
    """A line that says what is being measured; where there is no terminal, a line for each work. It is drawn between the turns
    only: during a turn nothing else may run."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._status: Any = None

    def __enter__(self) -> _Progress:
        from rich.live import Live

        self._status = Live(console=self._console, auto_refresh=False, transient=True)
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def report(self, what: str, done: int, total: int) -> None:
        """An `engine.bench.measure.Progress`."""
        if self._console.is_terminal:
            self._status.update(f"{what} ({done + 1} of {total})" if total > 1 else what, refresh=True)
        elif done == 0:
            self._console.print(f"{what}...", highlight=False)


def _show(report: Report) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 200
    settings, machine = report.settings, report.machine
    console.print(f"[bold]{settings['model']}[/], " + ", ".join(f"{k} {v}" for k, v in settings.items() if k != "model"))
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in machine.rates.items())
    console.print(f"memory {machine.memory_bandwidth / 1e9:.1f} GB/s; matrix rates, GFLOP/s: {rates} ({machine.origin})")
    reads = ", ".join(f"{read.size >> 20} MiB {read.bandwidth / 1e9:.1f}" for read in machine.reads)
    console.print(f"reads by working set, GB/s: {reads}")
    for name, peer in report.peers.items():
        chosen = ", ".join(f"{key} {value}" for key, value in peer["settings"].items())
        console.print(f"{name} {peer['version']}: {chosen}")
    console.print(_table(report))
    for overhead in report.overheads:
        console.print(
            f"step overhead, batch {overhead.batch}: {overhead.overhead * 1e3:.2f} ms beside the forward pass, "
            f"of {overhead.step * 1e3:.2f} ms a step"
        )
    for row in report.rows:
        if row.foreign > _FOREIGN:
            console.print(
                f"[yellow]{row.work.name}: other processes used {row.foreign:.0%} of a processor meanwhile; "
                "stop them and measure again.[/]"
            )
        if row.disturbance > _DISTURBED:
            console.print(
                f"[yellow]{row.work.name}: a side used {row.disturbance:.0%} of a processor during another's turn; "
                "its figures are less than they could be.[/]"
            )


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table(title="tokens/s: median (spread)", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("work", no_wrap=True)
    for header in ("engine", "seconds", "roofline", "bound", "share"):
        table.add_column(header, justify="right", no_wrap=True)
    for name in report.peers:
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("ratio", justify="right", no_wrap=True)
    for row in report.rows:
        cells = [
            row.work.name,
            f"{row.own.median:,.1f} ({row.own.spread:.0%})",
            f"{row.work.tokens / row.own.median:.3f}",
            f"{row.roofline:,.0f}",
            row.bound,
            f"{row.share:.0%}",
        ]
        for name in report.peers:
            cells += [f"{row.peers[name].median:,.1f} ({row.peers[name].spread:.0%})", f"{row.ratio(name):.2f}"]
        table.add_row(*cells)
    return table
