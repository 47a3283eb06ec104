"""`turnkeep engine`: one replica, of a model or simulated, behind the worker protocol."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cli.draft_options import check_draft, draft_config, draft_options
from cli.replica_server import check_server, run_server, server_options
from cli.simulated_engine import check_simulated, simulated, simulation_options
from cli.sizes import BatchSizes, MemorySize, OTLPAddress
from cli.tier_options import check_tiers, offload_config, tier_options
from engine.checkpoints import DEFAULT_MODEL, default_cache_dir
from engine.config import ConfigError
from engine.core import EngineCore
from engine.quantization.names import QUANTIZATIONS
from engine.server.listen import Address, TCPAddress, UnixAddress

Load = Callable[[], EngineCore[Any]]

logger = logging.getLogger(__name__)


@click.command("engine")
@click.option(
    "--model",
    default=None,
    metavar="NAME|DIR|FILE.gguf",
    help="An embedded model, a directory, a GGUF file, or a hub id; fetched or converted when that is not done yet. "
    f"[default: {DEFAULT_MODEL}]",
)
@click.option("--model-name", default=None, help="What the model is called to the outside. [default: its own name]")
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="TURNKEEP_CACHE_DIR",
    default=default_cache_dir,
    show_default="turnkeep in the user's cache directory",
    help="Where models are kept. Also TURNKEEP_CACHE_DIR.",
)
@click.option(
    "--known-tools",
    metavar="DIR|none",
    default=None,
    help="Where the grammars of tool lists are remembered, which are compiled again at the next start; none: nowhere. "
    "[default: grammars in the cache directory]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8100, show_default=True, help="TCP port; 0 takes a free one.")
@click.option("--uds", type=click.Path(path_type=Path), default=None, help="Listen on this unix socket instead.")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto", show_default=True)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16", "int8"]),
    default="auto",
    show_default=True,
    help="Of KV memory. auto: as --dtype; int8: half the memory of bfloat16, at some loss of precision.",
)
@click.option(
    "--quantization",
    type=click.Choice(QUANTIZATIONS),
    default="none",
    show_default=True,
    help="Weights in fewer bits: int8; int4; gguf, as in the GGUF file that the model came from. "
    "`turnkeep bench quality` shows what it costs.",
)
@click.option("--device", default="cpu", show_default=True, help="Torch device that computes.")
@click.option("--threads", type=click.IntRange(1), default=None, help="Threads to compute with. [default: as torch finds]")
@click.option(
    "--kernels",
    type=click.Choice(["auto", "reference"]),
    default="auto",
    show_default=True,
    help="auto: the fastest that this machine can build, said in the log; reference: plain torch, slower, to compare with.",
)
@click.option(
    "--graph-batch-sizes",
    type=BatchSizes(),
    default=None,
    help="On an NVIDIA GPU: for how many sequences a decode step is captured as a graph, as 1,2,4,8; none: for none.",
)
@click.option(
    "--kv-memory", type=MemorySize(), default=None, help="For KV blocks: bytes (8GiB) or a share of what is free (50%)."
)
@click.option("--num-blocks", type=click.IntRange(1), default=None, help="KV blocks, instead of --kv-memory.")
@tier_options
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens in a KV block.")
@click.option("--max-model-len", type=click.IntRange(2), default=None, help="Tokens of prompt and answer together.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=None, help="Sequences that run at once.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=None, help="Tokens computed in one step.")
@draft_options
@click.option(
    "--scheduling",
    type=click.Choice(["fcfs", "priority", "sessions"]),
    default=None,
    help="Who goes first: who came first; a lower priority; or sessions that fit, before others. [sessions; simulated: fcfs]",
)
@click.option("--no-prefix-caching", is_flag=True, help="Compute every prompt anew.")
@server_options
@click.option("--otlp", type=OTLPAddress(), default=None, metavar="URL", help="Send spans there over OTLP/HTTP.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)
@click.option("--debug-integrity", is_flag=True, help="Check the block pool's books whenever the engine is idle.")
@simulation_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Serve one replica: tokens in, tokens out (docs/worker-protocol.md).

    Prints one line of JSON on standard output when it can generate. Ends on SIGTERM or SIGINT, streams first.
    """
    logging.basicConfig(
        level=options["log_level"].upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    _check_combinations(ctx, options)
    address: Address = UnixAddress(options["uds"]) if options["uds"] else TCPAddress(options["host"], options["port"])
    load = simulated(options) if options["simulate"] else _real(options)
    code = run_server(load, address, options)
    from engine.server.run import LOAD_THREAD

    sys.stdout.flush()
    sys.stderr.flush()
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    if any(not thread.daemon or thread.name == LOAD_THREAD for thread in others):
        # A grammar that is still being compiled has no one left to wait for it, and a model that is still being loaded would be
        # torn from torch's own code by the interpreter's end, which aborts the process. Nothing stops them but this.
        logging.shutdown()
        os._exit(code)
    ctx.exit(code)


def _check_combinations(ctx: click.Context, options: dict[str, Any]) -> None:
    check_server(options)
    check_simulated(ctx, options)
    check_draft(options)
    if options["num_blocks"] is not None and options["kv_memory"] is not None:
        raise click.UsageError("--num-blocks and --kv-memory say the same thing; give one of them.")
    check_tiers(options)


def _check_device(device: str) -> None:
    """Raises ConfigError for a device that this machine, or this build of torch, does not have."""
    import torch

    try:
        torch.empty(1, device=device)
    except Exception as error:
        # Torch's own errors for this: RuntimeError, AssertionError, NotImplementedError.
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise ConfigError(f"device {device!r} cannot be used here: {reason}. Give --device cpu, or another one.") from error


def _real(options: dict[str, Any]) -> Load:
    def load() -> EngineCore[Any]:
        from rich.console import Console

        from cli.model import fetch

        name = options["model"] or DEFAULT_MODEL
        # First: a model that is not there is known at once.
        blocks = options["quantization"] == "gguf"
        cache_dir, console = options["cache_dir"].absolute(), Console(stderr=True)
        model = fetch(name, cache_dir, console, blocks=blocks)
        draft = draft_config(options, lambda name, blocks: fetch(name, cache_dir, console, blocks=blocks))

        # Imports torch, on the loading thread: the server answers meanwhile.
        from engine.config import EngineConfig
        from engine.loading import load_engine
        from engine.startup import StartupClock, seconds_since_launch

        _check_device(options["device"])
        given: dict[str, Any] = {
            field: options[field]
            for field in ("max_num_seqs", "max_num_batched_tokens", "graph_batch_sizes", "max_draft_tokens", "max_draft_batch")
            if options[field] is not None
        }
        if isinstance(options["kv_memory"], float):
            given["kv_memory_fraction"] = options["kv_memory"]
        elif options["kv_memory"] is not None:
            given["kv_memory_bytes"] = options["kv_memory"]
        config = EngineConfig(
            model=model,
            model_name=options["model_name"] or (Path(name).stem if Path(name).is_file() else model.name),
            dtype=options["dtype"],
            kv_dtype=options["kv_dtype"],
            quantization=options["quantization"],
            device=options["device"],
            block_size=options["block_size"],
            num_blocks=options["num_blocks"],
            max_model_len=options["max_model_len"],
            prefix_caching=not options["no_prefix_caching"],
            policy=options["scheduling"] or "sessions",
            threads=options["threads"],
            kernels=options["kernels"],
            draft=draft,
            **given,
        )
        return load_engine(
            config,
            cache_dir=options["cache_dir"].absolute(),
            clock=StartupClock(seconds_since_launch()),
            offload=offload_config(options),
            known_tools=_known_tools(options["known_tools"], options["cache_dir"].absolute()),
        )

    return load


def _known_tools(given: str | None, cache: Path) -> Path | None:
    if given == "none":
        return None
    return Path(given).absolute() if given else cache / "grammars"
