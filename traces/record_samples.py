"""Records the bundled trajectories again: `python -m traces.record_samples --url URL`.

Each session is one agent with MCP servers of its own; its turns are written as they were sent, generated and answered.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import click

from traces.agent import Agent, AgentConfig, AgentTurn
from traces.chat_client import ChatClient, ChatError, normalise_url
from traces.format import FORMAT_VERSION, Timing, TraceFormatError, TurnLine, Usage, encode_line
from traces.history import DeltaEncoder
from traces.replay import open_http
from traces.sample_tasks import TASKS, SampleTask
from traces.tool_host import ToolHost, ToolHostError

BUNDLED = Path(__file__).parent / "bundled"
SAMPLING = {"temperature": 0}
"""Greedy: recording again gives the same text, and differences are differences of the engine."""

MAX_TOKENS = 40


def to_line(session: str, turn: AgentTurn, tools: Sequence[dict[str, object]], model: str, encoder: DeltaEncoder) -> TurnLine:
    """A turn of an agent as a line. Raises TraceFormatError when the server reported no usage."""
    answer = turn.answer
    if answer.prompt_tokens is None or answer.completion_tokens is None:
        raise TraceFormatError(f"the server reported no usage in turn {turn.turn} of session {session!r}", field="usage")
    delta = encoder.encode(turn.messages, tools, turn.message)
    return TurnLine(
        v=FORMAT_VERSION,
        session=session,
        turn=turn.turn,
        gap_seconds=round(turn.gap_seconds, 3),
        keep=delta.keep,
        messages=delta.messages,
        tools=delta.tools,
        model=model,
        params=turn.params,
        assistant=turn.message,
        output_tokens=answer.completion_tokens,
        finish_reason=answer.finish_reason,
        usage=Usage(
            prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens, cached_tokens=answer.cached_tokens
        ),
        timing=Timing(
            duration=round(answer.duration, 3),
            time_to_first_token=None if answer.time_to_first_token is None else round(answer.time_to_first_token, 3),
        ),
        scripted=turn.scripted,
    )


async def record(
    http: aiohttp.ClientSession, url: str, model: str, task: SampleTask, folder: Path, *, api_key: str | None, max_tokens: int
) -> Path:
    """Runs one session and writes its file, whole or not at all. Raises ChatError, ToolHostError, TraceFormatError, OSError."""
    client = ChatClient(http, url, api_key=api_key)
    encoder = DeltaEncoder()
    config = AgentConfig(
        model=model,
        system=task.kind.system,
        session=task.name,
        max_tokens=max_tokens,
        params=SAMPLING,
    )
    with tempfile.TemporaryDirectory() as scratch:
        async with ToolHost(task.kind.servers(Path(scratch))) as host:
            turns = Agent(client, host, config).run(task.task, task.steps)
            lines = [encode_line(to_line(task.name, turn, host.tools, model, encoder)) async for turn in turns]
    path = folder / f"{task.name}.jsonl"
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(lines))
    partial.replace(path)
    return path


async def record_all(
    url: str, folder: Path, *, model: str | None, api_key: str | None, max_tokens: int, only: Sequence[str]
) -> None:
    async with open_http(1) as http:
        name = model or (await ChatClient(http, url, api_key=api_key).models())[0]
        for task in TASKS:
            if not only or task.name in only:
                path = await record(http, url, name, task, folder, api_key=api_key, max_tokens=max_tokens)
                click.echo(f"{path.name}: {len(task.steps)} turns")


@click.command()
@click.option("--url", required=True, help="An OpenAI-compatible server.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=BUNDLED, help="Folder for the files.")
@click.option("--model", help="Default: the server's first.")
@click.option("--api-key")
@click.option("--max-tokens", type=click.IntRange(1, 4096), default=MAX_TOKENS, show_default=True, help="Longest answer.")
@click.option("--only", multiple=True, help="Record these sessions only.")
def main(url: str, out: Path, model: str | None, api_key: str | None, max_tokens: int, only: tuple[str, ...]) -> None:
    """Record the bundled trajectories through the server at URL."""
    unknown = set(only) - {task.name for task in TASKS}
    if unknown:
        raise click.BadParameter(f"there is no session {', '.join(sorted(unknown))}", param_hint="--only")
    try:
        base = normalise_url(url)
        out.mkdir(parents=True, exist_ok=True)
        asyncio.run(record_all(base, out, model=model, api_key=api_key, max_tokens=max_tokens, only=only))
    except (ChatError, ToolHostError, TraceFormatError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
