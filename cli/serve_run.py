"""What `turnkeep serve` does once it knows its plan: serves until a signal comes, and says how far it is."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AbstractAsyncContextManager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.status import Status

from cli.long_lived import freeze_loaded, keep_freed_memory
from cli.processes import RunningProcesses, open_processes
from cli.serving import RunningGateway, ServePlan, open_gateway


async def serve(plan: ServePlan, console: Console) -> int:
    """Serves until a signal comes. Returns the exit code. Raises what `open_gateway` and ReplicaStartError say."""
    stop = _stop_on_signals()
    keep_freed_memory()
    status = Status("Starting", console=console) if console.is_terminal else None

    def forward(name: str, line: str) -> None:
        console.print(f"[dim]{escape(f'[{name}]')} {escape(line)}[/dim]", highlight=False, soft_wrap=True)

    opened: AbstractAsyncContextManager[RunningGateway | RunningProcesses] = (
        open_gateway(plan, forward=forward) if plan.processes == 1 else open_processes(plan, forward=forward)
    )
    async with opened as gateway:
        if not await _loaded(gateway, plan, console, status, stop):
            return 0
        freeze_loaded()
        _announce(gateway, plan, console)
        await _first(gateway.failed(), stop)
        console.print("Stopping: streams may finish.")
    return 0


async def _loaded(
    gateway: RunningGateway | RunningProcesses, plan: ServePlan, console: Console, status: Status | None, stop: asyncio.Event
) -> bool:
    """Waits for the replicas, saying how far they are. False when a signal came first."""
    what = f"{gateway.expected} {'replica' if gateway.expected == 1 else 'replicas'} of {_what(plan)}"
    console.print(f"Listening on {gateway.url}; loading {what}.", highlight=False)

    async def show(status: Status) -> None:
        while True:
            views = gateway.workers()
            up = sum(view.state == "ready" for view in views)
            waiting = next((f": {view.name} {view.detail}" for view in views if view.state != "ready" and view.detail), "")
            status.update(f"{up} of {gateway.expected} replicas ready{escape(waiting)}")
            await asyncio.sleep(0.2)

    showing = None
    if status is not None:
        status.start()
        showing = asyncio.create_task(show(status))
    try:
        return await _first(gateway.ready(), stop)
    finally:
        if showing is not None and status is not None:
            showing.cancel()
            status.stop()


def _what(plan: ServePlan) -> str:
    """The model that is served first; workers that take bodies as they are say themselves what theirs is."""
    return plan.gateway.models[0].name if plan.gateway.models else "MODEL"


def _announce(gateway: RunningGateway | RunningProcesses, plan: ServePlan, console: Console) -> None:
    model = _what(plan)
    key = ' \\\n  -H "Authorization: Bearer $API_KEY"' if plan.gateway.auth.restricted else ""
    example = (
        f"curl {gateway.url}/v1/chat/completions{key} \\\n"
        "  -H 'Content-Type: application/json' -H 'Session-ID: first' \\\n"
        f"""  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'"""
    )
    if console.is_terminal:
        console.print(Panel(f"[bold]{escape(model)}[/bold] is ready at [bold]{gateway.url}/v1[/bold]", expand=False))
    else:
        console.print(f"{model} is ready at {gateway.url}/v1", highlight=False)
    console.print(example, highlight=False, markup=False, soft_wrap=True)
    if gateway.admin_url is not None:
        console.print(f"Administration is at {gateway.admin_url}", highlight=False)


async def _first(waiting: Any, stop: asyncio.Event) -> bool:
    """Waits for either: True when `waiting` ended (its exception is raised), False when `stop` was set."""
    task = asyncio.ensure_future(waiting)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for waiter in (task, stopped):
            waiter.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def _stop_on_signals() -> asyncio.Event:
    """Set by SIGINT or SIGTERM; a second signal ends the process as signals do."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stopping(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping, number)
    return stop
