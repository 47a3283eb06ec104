"""`turnkeep engine`: one replica, of a model or simulated, behind the worker protocol."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import click

from cli.draft_options import check_draft, draft_config, draft_options
from cli.sizes import BatchSizes, MemorySize, OTLPAddress
from engine.checkpoints import DEFAULT_MODEL, CheckpointError, default_cache_dir, resolve
from engine.config import ConfigError
from engine.core import EngineCore
from engine.quantization.names import QUANTIZATIONS
from engine.server.config import ServerConfig
from engine.server.listen import Address, ListenError, TCPAddress, UnixAddress
from offload.codecs import CODECS
from offload.config import REMOTE_SCHEMES, OffloadConfig
from offload.errors import TierUnavailable

Load = Callable[[], EngineCore[Any]]

logger = logging.getLogger(__name__)


class _Simulated(click.Option):
    """An option that only means something with --simulate."""


def _sim_option(*names: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(*names, cls=_Simulated, **settings)


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
@click.option(
    "--host-kv-bytes",
    type=MemorySize(zero=True),
    default=None,
    help="Shared memory for KV blocks that the pool gives up, for all replicas of the model on this machine together (8GiB).",
)
@click.option(
    "--disk-kv-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Keep KV blocks in this directory too; they outlive the replica.",
)
@click.option("--disk-kv-bytes", type=MemorySize(), default=None, help="What this model's blocks may take there. [8GiB]")
@click.option(
    "--disk-kv-min-free", type=MemorySize(zero=True), default=None, help="What is left free on that file system. [1GiB]"
)
@click.option(
    "--kv-codec",
    type=click.Choice(CODECS),
    default="raw",
    show_default=True,
    help="How blocks are kept there: as they are, or in 8 bits, at some loss of precision.",
)
@click.option("--disk-kv-compress", is_flag=True, help="zstd around what is kept on disk.")
@click.option(
    "--remote-kv", default=None, metavar="URL", help="Keep KV blocks in this Redis too, for replicas of other machines."
)
@click.option("--remote-kv-bytes", type=MemorySize(), default=None, help="What this model's blocks may take there. [1GiB]")
@click.option(
    "--kv-load",
    type=click.Choice(["faster", "always"]),
    default="faster",
    show_default=True,
    help="Load what is kept where that is faster than computing it, as measured; or always.",
)
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
@click.option(
    "--max-requests", type=click.IntRange(1), default=1024, show_default=True, help="Requests in flight, waiting ones too."
)
@click.option("--max-body", type=MemorySize(), default=None, help="Largest request body. [default: from the context length]")
@click.option("--body-timeout", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="Seconds.")
@click.option("--write-timeout", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="Seconds.")
@click.option(
    "--shutdown-timeout", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds streams may go on."
)
@click.option(
    "--heartbeat", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True, help="Of event streams, s."
)
@click.option(
    "--kv-events", default=None, metavar="ADDRESS", help="Publish KV events there over ZMQ as vLLM does: tcp://*:5557."
)
@click.option("--kv-replay", default=None, metavar="ADDRESS", help="Replay them there: tcp://*:5558.")
@click.option("--kv-topic", default="", metavar="TEXT", help="Of those messages.")
@click.option("--register", multiple=True, metavar="URL", help="Tell this gateway that the replica is there; repeatable.")
@click.option("--register-token", default=None, metavar="TEXT", help="The gateways' registration token.")
@click.option("--register-name", default=None, metavar="NAME", help="Unique among a gateway's workers. [default: HOST-PORT]")
@click.option("--register-ttl", type=click.FloatRange(3, 3600), default=15.0, show_default=True, help="Seconds it holds.")
@click.option("--advertise", default=None, metavar="URL", help="Where gateways reach it. [default: where it listens]")
@click.option("--hang-timeout", type=click.FloatRange(1), default=900.0, show_default=True, help="Longest step, seconds.")
@click.option("--otlp", type=OTLPAddress(), default=None, metavar="URL", help="Send spans there over OTLP/HTTP.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)
@click.option("--debug-integrity", is_flag=True, help="Check the block pool's books whenever the engine is idle.")
@click.option("--simulate", is_flag=True, help="No model: real scheduling, cache and events, made-up tokens and times.")
@_sim_option(
    "--sim-tokens-from", default=None, metavar="NAME|DIR", help="Generate words of this model's tokenizer. [--model's]"
)
@_sim_option("--sim-vocab-size", type=click.IntRange(1), default=None, help="Size of the vocabulary. [49152, or --model's]")
@_sim_option("--sim-time-scale", type=click.FloatRange(0), default=None, help="Multiplies every duration; 0: none. [1]")
@_sim_option("--sim-output-tokens", type=click.IntRange(0), default=None, help="Mean length of answers; 0: no end token. [128]")
@_sim_option("--sim-seed", type=int, default=None, help="Which tokens are drawn. [0]")
@_sim_option("--sim-grammars", type=click.Choice(["refuse", "ignore"]), default=None, help="Requests with a grammar. [refuse]")
@_sim_option("--sim-step", type=click.FloatRange(0), default=None, help="Seconds of any step. [0.006]")
@_sim_option("--sim-prefill-token", type=click.FloatRange(0), default=None, help="Seconds a prompt token adds. [4e-5]")
@_sim_option("--sim-prefill-pair", type=click.FloatRange(0), default=None, help="... and each token before it. [1.3e-9]")
@_sim_option("--sim-decode-sequence", type=click.FloatRange(0), default=None, help="Seconds a generated token adds. [4e-5]")
@_sim_option("--sim-decode-context", type=click.FloatRange(0), default=None, help="... and each token before it. [5e-8]")
@_sim_option("--sim-kv-token-bytes", type=click.IntRange(1), default=None, help="What a token's KV takes in tiers. [131072]")
@_sim_option("--sim-host-rate", type=click.FloatRange(1), default=None, help="Bytes a second from host memory. [20e9]")
@_sim_option("--sim-disk-rate", type=click.FloatRange(1), default=None, help="Bytes a second from disk. [3e9]")
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
    load = _simulated(options) if options["simulate"] else _real(options)
    code = _run(load, address, options)
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
    if not options["simulate"]:
        for parameter in ctx.command.params:
            if isinstance(parameter, _Simulated) and parameter.name and options[parameter.name] is not None:
                raise click.UsageError(f"{parameter.opts[0]} only means something with --simulate.")
    elif options["scheduling"] == "sessions":
        raise click.UsageError("A simulated replica has no order of sessions; give --scheduling fcfs or priority.")
    elif options["kv_memory"] is not None:
        raise click.UsageError("A simulated replica has no KV memory to size; give --num-blocks instead of --kv-memory.")
    check_draft(options)
    if options["num_blocks"] is not None and options["kv_memory"] is not None:
        raise click.UsageError("--num-blocks and --kv-memory say the same thing; give one of them.")
    for name in ("max_body", "host_kv_bytes", "disk_kv_bytes", "disk_kv_min_free", "remote_kv_bytes"):
        if isinstance(options[name], float):
            raise click.UsageError(f"--{name.replace('_', '-')} is a number of bytes, not a share.")
    if options["remote_kv"] is not None and not options["remote_kv"].startswith(REMOTE_SCHEMES):
        raise click.UsageError("--remote-kv is the URL of a Redis: redis://HOST:PORT/DB, rediss://... or unix://PATH.")
    if options["disk_kv_compress"] and importlib.util.find_spec("zstandard") is None:
        raise click.UsageError("--disk-kv-compress needs the package zstandard: pip install 'turnkeep[zstd]', or leave it off.")
    if options["disk_kv_dir"] is None and (options["disk_kv_bytes"] is not None or options["disk_kv_compress"]):
        raise click.UsageError("Say with --disk-kv-dir where blocks are to be kept.")
    if any(options[name] is not None for name in ("host_kv_bytes", "disk_kv_dir", "remote_kv")):
        if options["simulate"] and (options["remote_kv"] or options["disk_kv_compress"] or options["kv_codec"] != "raw"):
            raise click.UsageError(
                "A simulated replica has host and disk tiers of made-up blocks; leave --remote-kv, --kv-codec and "
                "--disk-kv-compress out."
            )
        if options["no_prefix_caching"]:
            raise click.UsageError("Blocks are kept to be found again; leave --no-prefix-caching out.")


def _run(load: Load, address: Address, options: dict[str, Any]) -> int:
    from engine.server.registration import RegistrationConfig
    from engine.server.run import Ready, serve
    from engine.thread import EngineThreadConfig

    def announce(ready: Ready) -> None:
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
            offload=_offload(options),
            known_tools=_known_tools(options["known_tools"], options["cache_dir"].absolute()),
        )

    return load


def _known_tools(given: str | None, cache: Path) -> Path | None:
    if given == "none":
        return None
    return Path(given).absolute() if given else cache / "grammars"


def _offload(options: Mapping[str, Any]) -> OffloadConfig:
    directory = options["disk_kv_dir"]
    given = _given(options, disk_bytes="disk_kv_bytes", disk_min_free="disk_kv_min_free", remote_bytes="remote_kv_bytes")
    return OffloadConfig(
        host_bytes=options["host_kv_bytes"] or 0,
        disk=None if directory is None else directory.absolute(),
        codec=options["kv_codec"],
        compress=options["disk_kv_compress"],
        load=options["kv_load"],
        remote=options["remote_kv"],
        **given,
    )


def _simulated(options: dict[str, Any]) -> Load:
    def load() -> EngineCore[Any]:
        from engine.simulate import SimulatedEngine
        from engine.simulation.config import SimulationConfig
        from engine.simulation.likeness import likeness_of

        cache_dir = options["cache_dir"].absolute()
        name = options["model"] or "simulated"
        config = SimulationConfig(model=options["model_name"] or Path(name).name)
        tokenizer = None
        source = options["sim_tokens_from"] or _if_installed(options["model"], cache_dir)
        if source is not None:
            like = likeness_of(resolve(source, cache_dir))
            tokenizer = like.tokenizer
            config = replace(
                config,
                vocab_size=like.vocab_size,
                max_model_len=like.max_model_len or config.max_model_len,
                eos_token_ids=like.eos_token_ids,
                token_ids=like.token_ids,
            )
        costs = {"sim_step": "step", "sim_prefill_token": "prefill_token", "sim_prefill_pair": "prefill_pair"}
        costs |= {"sim_decode_sequence": "decode_sequence", "sim_decode_context": "decode_context_token"}
        config = replace(
            config,
            scheduling=_scheduling(options["scheduling"] or "fcfs"),
            block_size=options["block_size"],
            prefix_caching=not options["no_prefix_caching"],
            accept_grammars=options["sim_grammars"] == "ignore",
            offload=_offload(options),
            cost=replace(config.cost, **{costs[name]: options[name] for name in costs if options[name] is not None}),
            **_given(
                options,
                num_blocks="num_blocks",
                max_model_len="max_model_len",
                max_num_seqs="max_num_seqs",
                max_num_batched_tokens="max_num_batched_tokens",
                vocab_size="sim_vocab_size",
                time_scale="sim_time_scale",
                mean_output_tokens="sim_output_tokens",
                seed="sim_seed",
                kv_token_bytes="sim_kv_token_bytes",
                host_rate="sim_host_rate",
                disk_rate="sim_disk_rate",
            ),
        )
        return SimulatedEngine(config, tokenizer=tokenizer)

    return load


def _given(options: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {field: options[option] for field, option in names.items() if options[option] is not None}


def _scheduling(name: str) -> Literal["fcfs", "priority"]:
    return "priority" if name == "priority" else "fcfs"


def _if_installed(model: str | None, cache_dir: Path) -> str | None:
    """A simulated replica may bear the name of a model that is not here; then only its name is taken over."""
    if model is None:
        return None
    try:
        resolve(model, cache_dir)
    except CheckpointError as error:
        logger.info("only the name of %s is simulated: %s", model, error)
        return None
    return model
