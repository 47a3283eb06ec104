"""`turnkeep demo`: an agent works through the gateway, then recorded sessions show what prefix-aware routing buys."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from cli.gateway_process import GatewayError, GatewayProcess, serve_command
from traces.agent import Agent, AgentConfig, AgentTurn
from traces.chat_client import ChatClient, ChatError
from traces.format import TraceFormatError
from traces.index import SessionEntry, expand_paths, index_files
from traces.progress import ReplayProgress
from traces.record_samples import BUNDLED, MAX_TOKENS, SAMPLING
from traces.replay import Goodput, Replay, ReplayConfig, choose_model, open_http
from traces.report import Run, table
from traces.sample_tasks import TASKS, SampleTask
from traces.tool_host import ToolHost, ToolHostError
from traces.unlimited_cache import unlimited_bound
from traces.verdict import verdict

INTERRUPTED = 130
POLICIES = (("round_robin", "round robin"), ("prefix", "prefix-aware"))
"""As `turnkeep serve --policy` calls them, and as the table does."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """`serve`: the command line of a gateway on a free port under a policy. `task`: what the agent does."""

    serve: Callable[[str], Sequence[str]]
    task: SampleTask
    traces: Sequence[Path]
    replicas: int = 2
    concurrency: int = 4
    max_tokens: int = MAX_TOKENS
    goodput: Goodput = field(default_factory=lambda: Goodput(ttft=2000.0, tpot=200.0))


async def run_demo(config: DemoConfig, console: Console) -> list[Run]:
    """The whole demo. Returns the replays, in the order of POLICIES.

    Raises GatewayError, ChatError, ToolHostError and TraceFormatError, with nothing left running.
    """
    entries = index_files(expand_paths(config.traces))
    turns = sum(entry.turns for entry in entries)
    console.rule("An agent at work")
    async with _gateway(config, "prefix", console) as gateway, open_http(config.concurrency) as http:
        client = ChatClient(http, gateway.url)
        await _agent_job(config, client, console)
    console.rule("Recorded sessions, replayed")
    _print(
        console,
        f"{len(entries)} sessions with {turns} turns, {config.concurrency} sessions at a time, {config.replicas} replicas. "
        "Each policy gets a gateway of its own with empty caches.",
    )
    runs = []
    for policy, name in POLICIES:
        async with _gateway(config, policy, console) as gateway, open_http(config.concurrency) as http:
            runs.append(await _replay(config, ChatClient(http, gateway.url), entries, name, console, turns))
    return runs


def _print(console: Console, text: str | Text) -> None:
    """As it is: numbers uncoloured, and long lines left to the terminal, so that they can be copied and searched."""
    console.print(text, highlight=False, soft_wrap=True)


def _gateway(config: DemoConfig, policy: str, console: Console) -> GatewayProcess:
    _print(console, f"[dim]Starting a gateway with {config.replicas} replicas, policy {policy}[/dim]")
    return GatewayProcess(config.serve(policy))


async def _agent_job(config: DemoConfig, client: ChatClient, console: Console) -> None:
    """One agent, its MCP servers over stdio, its model behind the gateway."""
    task = config.task
    model = (await client.models())[0]
    _print(console, f"[bold]{task.kind.name}[/bold]: {task.task}")
    with tempfile.TemporaryDirectory() as scratch:
        async with ToolHost(task.kind.servers(Path(scratch))) as host:
            names = ", ".join(spec.name for spec in task.kind.servers(Path(scratch)))
            _print(console, f"[dim]MCP servers over stdio: {names}; {len(host.tools)} tools[/dim]")
            agent = Agent(
                client,
                host,
                AgentConfig(
                    model=model,
                    system=task.kind.system,
                    session=f"demo-{task.name}",
                    max_tokens=config.max_tokens,
                    params=SAMPLING,
                ),
            )
            scripted = False
            async for turn in agent.run(task.task, task.steps):
                _show_turn(turn, console)
                scripted = scripted or bool(turn.scripted)
    if scripted:
        _print(
            console,
            "[dim]* The small model cannot plan: a script chose the tool (** and its arguments). Tool results are real.[/dim]",
        )


def _show_turn(turn: AgentTurn, console: Console) -> None:
    answer = turn.answer
    share = (answer.cached_tokens or 0) / answer.prompt_tokens if answer.prompt_tokens else 0.0
    first = "-" if answer.time_to_first_token is None else f"{answer.time_to_first_token * 1000:,.0f} ms"
    line = Text(f"turn {turn.turn + 1:>2}  {answer.worker or '?':<10} ", style="bold")
    prompt, cached = answer.prompt_tokens or 0, answer.cached_tokens or 0
    line.append(f"{prompt:>6,} prompt tokens, {cached:>6,} cached ({share:4.0%}), first token {first}", style="not bold")
    _print(console, line)
    mark = "*" * len(set(turn.scripted) & {"tool", "arguments"})
    for use in turn.uses:
        _print(console, Text(f"         → {use.name} {_shorten(use.arguments, 70)}{mark}", style="cyan"))
        style = "red" if use.result.is_error else "dim"
        _print(console, Text(f"         ← {_shorten(use.result.text, 90)}", style=style))
    if not turn.uses:
        words = _shorten(str(turn.message.get("content") or ""), 160)
        _print(console, Text(f"         “{words}”", style="green"))


def _shorten(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


async def _replay(
    config: DemoConfig,
    client: ChatClient,
    entries: Sequence[SessionEntry],
    name: str,
    console: Console,
    turns: int,
) -> Run:
    model = await choose_model(client, entries)
    progress = ReplayProgress(console, name, turns)
    settings = ReplayConfig(concurrency=config.concurrency, model=model, goodput=config.goodput)
    replay = Replay(settings, [client], lambda: progress.turn(replay))
    with progress:
        await replay.run(entries)
    with ReplayProgress(console, "tokenising", turns) as progress:
        bound = await unlimited_bound(client, entries, replay.result.answers, model=model, on_turn=progress.turn)
    return Run(name, replay.result, bound)


def _serve_options(model: str | None, replicas: int, log_level: str, cache_dir: Path | None) -> list[str]:
    options = ["--replicas", str(replicas), "--log-level", log_level]
    if model is not None:
        options += ["--model", model]
    if cache_dir is not None:
        options += ["--cache-dir", str(cache_dir)]
    return options


async def _until_signal(config: DemoConfig, console: Console) -> list[Run]:
    """Runs the demo; SIGTERM ends it as Ctrl-C does, in order."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    if task is not None:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await run_demo(config, console)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@click.command(name="demo")
@click.option("--model", metavar="NAME|DIR", help="An installed model or a directory. [default: that of turnkeep serve]")
@click.option("--replicas", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--concurrency", type=click.IntRange(1, 256), default=4, show_default=True, help="Sessions side by side.")
@click.option("--quick", is_flag=True, help="A few turns of the agent and three sessions only.")
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), help="Where models are kept.")
def command(model: str | None, replicas: int, concurrency: int, quick: bool, cache_dir: Path | None) -> None:
    """Show what Turnkeep does, on this machine, in a few minutes.

    A real agent does a multi-turn job with MCP tools through a gateway with its own replicas. Then the bundled sessions are
    replayed twice, with turns dealt to the replicas in rotation and with turns sent where their prefix is.
    """
    console = Console()
    started = time.monotonic()
    options = _serve_options(model, replicas, "warning", cache_dir)
    task = TASKS[0]
    traces = [BUNDLED / f"{task.name}.jsonl" for task in TASKS]
    if quick:
        task = SampleTask(task.name, task.kind, task.task, task.steps[:3])
        traces = traces[:3]
    config = DemoConfig(
        serve=lambda policy: serve_command(*options, "--policy", policy),
        task=task,
        traces=traces,
        replicas=replicas,
        concurrency=concurrency,
    )
    try:
        runs = asyncio.run(_until_signal(config, console))
    except (GatewayError, ChatError, ToolHostError, TraceFormatError) as error:
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("Interrupted; everything that was started has ended.")
        sys.exit(INTERRUPTED)
    console.print(table(runs))
    console.print(verdict(runs[0], runs[-1]))
    _print(console, f"[dim]{time.monotonic() - started:.0f} s on {len(os.sched_getaffinity(0))} cores[/dim]")
    failures = [sentence for run in runs for sentence in run.result.errors]
    for sentence in failures:
        _print(console, Text(sentence, style="red"))
    if failures:
        sys.exit(1)
