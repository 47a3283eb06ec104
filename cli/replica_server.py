"""The server of a replica: its options, and its run from the first connection to the last."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import click

from cli.long_lived import freeze_loaded
from cli.sizes import MemorySize
from engine.checkpoints import CheckpointError
from engine.config import ConfigError
from engine.core import EngineCore
from engine.server.config import ServerConfig
from engine.server.listen import Address, ListenError
from offload.errors import TierUnavailable

logger = logging.getLogger(__name__)

Command = Callable[..., Any]

_OPTIONS: tuple[Callable[[Command], Command], ...] = (
    click.option(
        "--max-requests", type=click.IntRange(1), default=1024, show_default=True, help="Requests in flight, waiting ones too."
    ),
    click.option(
        "--max-body", type=MemorySize(), default=None, help="Largest request body. [default: from the context length]"
    ),
    click.option("--body-timeout", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="Seconds."),
    click.option("--write-timeout", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="Seconds."),
    click.option(
        "--shutdown-timeout", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds streams may go on."
    ),
    click.option(
        "--heartbeat", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True, help="Of event streams, s."
    ),
    click.option(
        "--kv-events", default=None, metavar="ADDRESS", help="Publish KV events there over ZMQ as vLLM does: tcp://*:5557."
    ),
    click.option("--kv-replay", default=None, metavar="ADDRESS", help="Replay them there: tcp://*:5558."),
    click.option("--kv-topic", default="", metavar="TEXT", help="Of those messages."),
    click.option("--register", multiple=True, metavar="URL", help="Tell this gateway that the replica is there; repeatable."),
    click.option("--register-token", default=None, metavar="TEXT", help="The gateways' registration token."),
    click.option(
        "--register-name", default=None, metavar="NAME", help="Unique among a gateway's workers. [default: HOST-PORT]"
    ),
    click.option("--register-ttl", type=click.FloatRange(3, 3600), default=15.0, show_default=True, help="Seconds it holds."),
    click.option("--advertise", default=None, metavar="URL", help="Where gateways reach it. [default: where it listens]"),
    click.option("--hang-timeout", type=click.FloatRange(1), default=900.0, show_default=True, help="Longest step, seconds."),
)


def server_options(command: Command) -> Command:
    """Adds them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_server(options: Mapping[str, Any]) -> None:
    """Raises UsageError for combinations that mean nothing."""
    if options["kv_replay"] and not options["kv_events"]:
        raise click.UsageError("--kv-replay without --kv-events: nothing would be published that could be replayed.")
    if options["register"]:
        for gateway in options["register"]:
            if not gateway.startswith(("http://", "https://")):
                raise click.UsageError(f"--register takes the URL of a gateway, http://host:port, not {gateway!r}.")
        if not options["register_token"]:
            raise click.UsageError("--register needs --register-token (or TURNKEEP_ENGINE_REGISTER_TOKEN).")
        if not options["advertise"] and not options["uds"] and options["host"] in ("0.0.0.0", "::", ""):
            raise click.UsageError(
                f"--register with --host {options['host']} needs --advertise: where gateways reach this replica."
            )
    if isinstance(options["max_body"], float):
        raise click.UsageError("--max-body is a number of bytes, not a share.")


def run_server(load: Callable[[], EngineCore[Any]], address: Address, options: Mapping[str, Any]) -> int:
    """Serves what `load` makes; the exit status."""
    from engine.server.registration import RegistrationConfig
    from engine.server.run import Ready, serve
    from engine.thread import EngineThreadConfig

    def announce(ready: Ready) -> None:
        freeze_loaded()
        click.echo(json.dumps({"event": "ready", **asdict(ready)}))
        sys.stdout.flush()

    config = ServerConfig(
        max_body=options["max_body"],
        body_timeout=options["body_timeout"],
        write_timeout=options["write_timeout"],
        heartbeat=options["heartbeat"],
        shutdown_timeout=options["shutdown_timeout"],
        kv_events=options["kv_events"],
        kv_replay=options["kv_replay"],
        kv_topic=options["kv_topic"],
    )
    thread_config = EngineThreadConfig(
        max_requests=options["max_requests"],
        hang_seconds=options["hang_timeout"],
        debug_integrity=options["debug_integrity"],
    )
    registration = None
    if options["register"]:
        registration = RegistrationConfig(
            gateways=tuple(gateway.rstrip("/") for gateway in options["register"]),
            token=options["register_token"],
            url=options["advertise"] or "",
            name=options["register_name"] or "",
            ttl=options["register_ttl"],
        )
    try:
        return asyncio.run(
            serve(
                load,
                address,
                config,
                thread_config,
                otlp_url=options["otlp"],
                registration=registration,
                on_ready=announce,
            )
        )
    except (ListenError, CheckpointError, ConfigError, TierUnavailable) as error:
        click.echo(f"Error: {str(error).rstrip('.')}.", err=True)
        return 1
    except Exception as error:
        # Of torch or the system: no memory for the blocks, a device that does not work. The log has where it came from.
        logger.exception("the replica failed")
        what = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        click.echo(f"Error: The replica failed: {what.rstrip('.')}. The log above has the details.", err=True)
        return 1
