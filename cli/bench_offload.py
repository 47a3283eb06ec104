"""`turnkeep bench offload`: what keeping KV below the device is worth on this machine."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.json_file import JSON_OPTION
from cli.model import CACHE_OPTION, fetch
from engine.checkpoints import DEFAULT_MODEL, CheckpointError
from engine.config import ConfigError
from traces.format import TraceFormatError
from traces.importers.texts import read_texts

if TYPE_CHECKING:
    from engine.bench.offload.report import OffloadReport, Row, WorthRow

MEASURES = ("rates", "stores", "restart", "worth", "pools", "overload", "shared")
_GAP, _TWICE_GAP = 8.0, 2.0
"""Seconds. Of tool gaps half take less than about five. Twice the sessions are meant to keep the machine busy."""

_BUNDLED = Path(__file__).parent.parent / "traces" / "bundled"


@click.command("offload")
@click.argument("traces", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--model", default=DEFAULT_MODEL, show_default=True, metavar="NAME|DIR|FILE.gguf", help="Fetched if need be.")
@CACHE_OPTION
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(1), default=None, help="[as torch finds]")
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=tempfile.gettempdir,
    show_default="the system's, for temporary files",
    help="On the disk to be measured.",
)
@click.option("--only", type=click.Choice(MEASURES), multiple=True, help="Measure this alone; repeatable.")
@click.option("--sessions", type=click.IntRange(1, 1000), default=12, show_default=True, help="That fit.")
@click.option(
    "--turns",
    type=click.IntRange(2, 1000),
    default=12,
    show_default=True,
    help="Of each, at most, and as far as the model's context goes.",
)
@click.option("--output", type=click.IntRange(1, 1000), default=8, show_default=True, help="Tokens generated in each turn.")
@click.option(
    "--gap",
    type=click.FloatRange(0.01, 600),
    default=None,
    help="Mean time between turns, seconds.  [default: 8, of which the median is 5.5; with twice the sessions 2]",
)
@click.option(
    "--within",
    type=click.FloatRange(0, min_open=True),
    default=None,
    metavar="SECONDS",
    help="In which the sessions begin.  [default: three times the gap]",
)
@click.option("--turn-tokens", type=click.IntRange(64), default=6000, show_default=True, help="Of the turn after a restart.")
@click.option(
    "--share",
    "shares",
    type=click.FloatRange(0, 1, min_open=True),
    multiple=True,
    default=(1.0, 0.5, 0.25, 0.125),
    show_default="1, 0.5, 0.25, 0.125",
    help="Of the working set that pools hold; repeatable.",
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Of stores and restarts; medians count.")
@click.option("--rate-mib", type=click.IntRange(8), default=512, show_default=True, help="What rates are measured over.")
@click.option("--policy", type=click.Choice(["fcfs", "sessions"]), default="sessions", show_default=True, help="Of our side.")
@click.option(
    "--budget", type=click.FloatRange(0, min_open=True), default=None, metavar="SECONDS", help="Measure what that allows."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the gaps.")
@JSON_OPTION
def offload_command(traces: tuple[Path, ...], **options: Any) -> None:
    """Replay sessions with pools that do not hold them, with and without tiers, and print what it takes.

    TRACES are trajectory files (docs/trajectory-format.md), results of tau_bench (.json), or sessions of lmcache_agent_trace,
    or directories of such .jsonl files; of several, sessions are taken by turns. Without any, the bundled samples. Texts are
    tokenised as they stand, tool results are those of the trace; gaps are drawn anew. An interrupt prints what there is.
    """
    from rich.console import Console

    logging.basicConfig(level="WARNING")
    console = Console(stderr=True)
    try:
        model = fetch(options["model"], options["cache_dir"].absolute(), console)
        histories = list(_histories(traces or (_BUNDLED,), model))
        if not histories:
            raise click.UsageError("There is no session of two turns in these traces.")
        # Imports torch.
        from engine.bench.offload.engines import Engines
        from engine.bench.offload.report import OffloadBench
        from engine.bench.offload.run import run_offload_bench
        from engine.bench.offload.workload import fitting, sessions_of
        from engine.config import EngineConfig

        config = EngineConfig(model=model, dtype=options["dtype"], threads=options["threads"], policy=options["policy"])
        engines = Engines(config, options["cache_dir"].absolute())
        fit = fitting(histories, engines.context - options["output"])
        if not fit:
            raise click.UsageError(f"No session of these traces has two turns in the {engines.context} tokens of the context.")
        gap, twice_gap = options["gap"] or _GAP, options["gap"] or _TWICE_GAP
        sessions, twice = (
            sessions_of(
                fit,
                count=count,
                turns=options["turns"],
                output=options["output"],
                gap=mean,
                seed=options["seed"],
                within=options["within"],
            )
            for count, mean in ((options["sessions"], gap), (2 * options["sessions"], twice_gap))
        )
        bench = OffloadBench(
            directory=options["directory"].absolute(),
            sessions=sessions,
            twice=twice,
            gap=gap,
            twice_gap=twice_gap,
            turn_tokens=options["turn_tokens"],
            shares=options["shares"],
            repeats=options["repeats"],
            rate_bytes=options["rate_mib"] << 20,
            measures=options["only"] or MEASURES,
            budget=options["budget"],
        )
        report = run_offload_bench(engines, bench, lambda what: console.print(f"[dim]{what}[/dim]", highlight=False))
    except (CheckpointError, ConfigError, TraceFormatError) as error:
        raise click.ClickException(str(error)) from error
    for line in lines_of(report):
        click.echo(line)
    if options["json_file"] is not None:
        options["json_file"].write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if report.failed:
        raise click.exceptions.Exit(1)


def _histories(paths: Sequence[Path], model: Path) -> Iterable[tuple[str, list[Any]]]:
    """Sessions of two turns or more: their prompts as token ids, each the beginning of the next."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for session in read_texts(paths):
        ids: list[int] = []
        prompts = []
        for text in session.additions:
            ids.extend(tokenizer.encode(text, add_special_tokens=False).ids)
            prompts.append(np.array(ids, dtype=np.uint32))
        yield session.name, prompts


def lines_of(report: OffloadReport) -> Iterable[str]:
    """What is printed."""
    yield f"a block takes {report.block_bytes / 1024:.0f} KiB; the sessions' working set is {report.working_set} blocks"
    if report.rates is not None:
        rates = report.rates
        yield (
            f"host tier: load {rates.host_load:.2f} GB/s, {rates.host_load / rates.memcpy:.0%} of memcpy "
            f"({rates.memcpy:.2f} GB/s); store {rates.host_store:.2f} GB/s"
        )
        yield (
            f"disk tier: load {rates.disk_load:.2f} GB/s from a cold cache, {rates.disk_load / rates.sequential_read:.0%} of a "
            f"sequential read ({rates.sequential_read:.2f} GB/s); store {rates.disk_store:.2f} GB/s"
        )
    if report.decode_with_stores is not None and report.decode_without is not None:
        cost = 1 - report.decode_with_stores / report.decode_without
        yield (
            f"stores: decoding at {report.decode_with_stores:.1f} tokens/s with them, {report.decode_without:.1f} without: "
            f"they cost {cost:.1%}, and {report.store_processor_share or 0:.1%} of the processor time"
        )
    if report.restart_computed is not None and report.restart_loaded is not None:
        yield (
            f"restart: first token after {report.restart_loaded:.3f} s with {report.restart_cached} tokens loaded, "
            f"{report.restart_computed:.3f} s computed: {report.restart_computed / report.restart_loaded:.1f} x"
        )
    if report.worth:
        yield "load or recompute: first token beside computing everything again"
        yield f"{'medium':>26} {'p50':>8} {'computed':>9} {'ratio':>6} {'mean':>8} {'computed':>9} {'ratio':>6} {'loaded':>7}"
        yield from map(_worth_line, report.worth)
    if report.unlimited is not None or report.pools:
        yield "sessions that fit the tiers:"
        yield _HEAD
        yield from map(_line, (*filter(None, (report.unlimited,)), *_ordered(report.pools)))
    if report.overload:
        yield "twice as many as the host tier holds:"
        yield _HEAD
        yield from map(_line, _ordered(report.overload))
    if report.shared_arena is not None and report.private_arenas is not None:
        yield (
            f"moved sessions on two replicas: {report.shared_arena:.1%} cached with one shared arena, "
            f"{report.private_arenas:.1%} with two private ones of half its size"
        )
    for name, why in report.missing.items():
        yield f"{name}: not all of it was measured: {why}"
    for target in report.targets():
        mark = "reached" if target.reached else "MISSED"
        yield f"{mark:8} {target.name}: {target.value:.3g}, {'at most' if target.at_most else 'at least'} {target.bound:.3g}"


def _worth_line(row: WorthRow) -> str:
    return (
        f"{row.medium:>26} {row.tiers_p50:8.3f} {row.computed_p50:9.3f} {row.p50_ratio:6.3f} "
        f"{row.tiers_mean:8.3f} {row.computed_mean:9.3f} {row.mean_ratio:6.3f} {row.loaded_share:7.1%}"
    )


_HEAD = (
    f"{'pool':>10} {'blocks':>7} {'':20} {'TTFT p50':>9} {'p99':>8} {'session':>9} {'p95':>8} {'tokens/s':>9} {'cached':>7} "
    f"{'computed':>9} {'held':>5} {'paused':>6} {'busy':>5} {'others':>6}"
)


def _ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.share)


def _line(row: Row) -> str:
    pool = "all" if row.side == "unlimited" else f"{row.share:g}"
    return (
        f"{pool:>10} {row.blocks:>7} {row.side:20} {row.first_token_p50:9.3f} {row.first_token_p99:8.3f} "
        f"{row.mean_completion:9.2f} {row.p95_completion:8.2f} {row.tokens_per_second:9.0f} {row.cached_share:7.1%} "
        f"{row.computed_tokens:>9} {row.held:>5} {row.pauses:>6} {row.busy:5.0%} {row.others:6.0%}"
    )
