"""One of the processes of `turnkeep serve --processes N`: `python -m cli.gateway_child NUMBER SOCKET`, its plan on standard
input. It serves the shared port until SIGTERM, and its peers on the socket."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pickle
import resource
import signal
import sys
from pathlib import Path

from cli.config import ConfigError
from cli.discovery import found_workers
from cli.long_lived import freeze_loaded, keep_freed_memory
from cli.serving import ProcessPlan, ServePlan, open_gateway
from gateway.server import ListenError
from gateway.supervision.supervisor import ReplicaStartError
from gateway.tokenization import ModelFilesError
from traces.recorder import RecorderError

log = logging.getLogger(__name__)


def main() -> int:
    """The exit status. 2: starting again would not help."""
    number, path = int(sys.argv[1]), Path(sys.argv[2])
    # From the process that started this one, through a pipe that nobody else has.
    plan: ServePlan = pickle.loads(sys.stdin.buffer.read())
    logging.basicConfig(level=plan.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return asyncio.run(_serve(plan, number, path))
    except (ConfigError, ListenError, ModelFilesError, RecorderError, ReplicaStartError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


async def _serve(plan: ServePlan, number: int, path: Path) -> int:
    stop = asyncio.Event()
    keep_freed_memory()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    mine = dataclasses.replace(
        plan,
        replicas=dataclasses.replace(plan.replicas, count=0),
        record=plan.record / f"process-{number}" if plan.record is not None else None,
        sources=found_workers(plan.discovery)[1] if plan.discovery is not None else (),
    )
    async with open_gateway(mine, process=ProcessPlan(path)):
        freeze_loaded()
        await stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
