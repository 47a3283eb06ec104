"""`turnkeep serve`: the gateway, with replicas of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.logging import RichHandler

from cli.config import (
    ConfigError,
    engine_arguments,
    generated_options,
    generated_values,
    load_file,
)
from cli.discovery import found_workers
from cli.model import fetch, own_name
from cli.serve_run import serve
from cli.serving import DiscoveryOptions, ReplicaPlan, ServePlan
from engine.checkpoints import DEFAULT_MODEL, CheckpointError, default_cache_dir
from gateway.access.config import AuthConfig
from gateway.admission.config import AdmissionConfig
from gateway.auth import ApiKeys
from gateway.certificate import TlsError
from gateway.config import MIB, GatewayConfig, HttpConfig, ModelConfig, SessionsConfig
from gateway.discovery.fleet import FleetConfig
from gateway.discovery.registration import MIN_TOKEN
from gateway.dispatch import PoolConfig
from gateway.router.config import POLICIES, RouterConfig
from gateway.server import ListenError
from gateway.supervision.supervisor import ReplicaStartError
from gateway.telemetry.config import TelemetryConfig
from gateway.tokenization import ModelFilesError
from gateway.turns.config import TurnsConfig
from gateway.watching.config import MissesConfig
from gateway.workers.tls import worker_tls
from grammar.formats.registry import FORMAT_NAMES
from sessions.file_store import SessionFileError
from sessions.gaps.model import GapConfig
from sessions.identity import DEFAULT_ORDER
from sessions.redis_link import RedisConfig
from traces.recorder import RecorderError

ENGINE_OPTIONS = (
    *("dtype", "quantization", "kv_dtype", "kv_memory", "num_blocks", "max_model_len", "simulate"),
    *("host_kv_bytes", "disk_kv_dir", "disk_kv_bytes"),
)
"""Options of `turnkeep engine` that `turnkeep serve` has as well; the others go through --engine or the file."""


def _read_config(ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Runs before every other option: what the file says becomes click's default map."""
    if path is not None:
        try:
            values, engine = load_file(path)
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from error
        ctx.default_map = {**(ctx.default_map or {}), **values}
        ctx.meta["turnkeep.engine"] = engine
    return path


@click.command("serve")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_read_config,
    is_eager=True,
    help="Read settings from this TOML file (docs/configuration.md). Options and TURNKEEP_SERVE_ variables go before it.",
)
@click.option(
    "--model",
    default=None,
    show_default=f"{DEFAULT_MODEL}; none where all workers are opaque",
    metavar="NAME|DIR|FILE.gguf",
    help="An embedded model, a directory, a GGUF file, or a hub id; fetched or converted when that is not done yet.",
)
@click.option(
    "--also-serve",
    multiple=True,
    metavar="NAME=MODEL",
    help="Another model, or an adapter by its base, that workers elsewhere serve: tokenizer and template are needed here.",
)
@click.option(
    "--served-model-name", multiple=True, metavar="NAME", help="What the API calls the model; more of them are aliases."
)
@click.option(
    "--tool-format",
    type=click.Choice(FORMAT_NAMES),
    default=None,
    help="How --model writes tool calls. [default: as its chat template says]",
)
@click.option("--replicas", type=click.IntRange(0, 1024), default=None, help="Local replicas. [default: 1; 0 with --worker]")
@click.option(
    "--worker",
    multiple=True,
    metavar="[KIND=]URL[,OPTION=VALUE]",
    help="A worker that runs elsewhere, http://host:port or unix:PATH: a replica, or vllm=http://...; or where to find them, "
    "dns://HOST:PORT, srv://NAME, k8s://SERVICE:PORT (docs/workers.md).",
)
@click.option(
    "--workers-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Workers in a TOML file, which is read again when it changes.",
)
@click.option(
    "--worker-ca", default=None, metavar="FILE", help="Trust these authorities too (PEM) where workers are https://...."
)
@click.option(
    "--registration-token", default=None, metavar="TEXT", help="Let workers register themselves that have this token."
)
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Processes of the gateway that share its port; one uses one core.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--api-key", multiple=True, metavar="KEY", help="Let in only who has one of these keys.")
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The same, one key or its hash a line, with tenant and limits (`turnkeep keys`); read again when it changes.",
)
@click.option("--admin-port", type=click.IntRange(0, 65535), default=None, help="A port of its own for administration.")
@click.option("--admin-host", default="127.0.0.1", show_default=True, help="The address of that port.")
@click.option("--tls-cert", default=None, metavar="FILE", help="Serve HTTPS with this certificate chain (PEM).")
@click.option("--tls-key", default=None, metavar="FILE", help="And this private key.")
@click.option("--cors-origin", multiple=True, metavar="ORIGIN", help="Web pages that may call the gateway; * for all.")
@click.option(
    "--policy", type=click.Choice(POLICIES), default="prefix", show_default=True, help="How turns find their replica."
)
@click.option(
    "--shadow-policy",
    type=click.Choice(POLICIES),
    help="A policy whose choices are scored beside the live one's, and not used.",
)
@click.option(
    "--session-source",
    multiple=True,
    metavar="SOURCE",
    help="Where to look for a session's name, in order: session-id, body.session_id, ... (docs/http-api.md). "
    "[default: everywhere, most specific first]",
)
@click.option(
    "--ledger/--no-ledger",
    default=True,
    show_default=True,
    help="Keep the exact token ids of sessions; without, every turn is rendered and tokenised whole.",
)
@click.option(
    "--redis",
    default=None,
    metavar="URL",
    help="Share sessions with other gateways through this Redis: redis://HOST:PORT/DB, rediss://..., unix://PATH.",
)
@click.option(
    "--session-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep sessions there too, so that they outlive the gateway.",
)
@click.option("--record", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Record turns as trajectories.")
@click.option("--otlp", default=None, metavar="URL", help="Send spans there over OTLP/HTTP.")
@click.option("--otlp-header", multiple=True, metavar="NAME=VALUE", help="A header for the OTLP collector.")
@click.option("--max-body-mib", type=click.FloatRange(0, 4096, min_open=True), default=64.0, show_default=True)
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=["TURNKEEP_SERVE_CACHE_DIR", "TURNKEEP_CACHE_DIR"],
    default=default_cache_dir,
    show_default="turnkeep in the user's cache directory",
    help="Where models are kept. Also TURNKEEP_CACHE_DIR.",
)
@click.option("--dtype", default=None, help="Of weights: auto, bfloat16, float16, float32.")
@click.option("--kv-dtype", default=None, help="Of KV memory: auto (as the weights), float32, bfloat16, float16, int8.")
@click.option("--quantization", default=None, help="Weights in fewer bits: none, int8, int4, gguf.")
@click.option("--kv-memory", default=None, help="For KV blocks of each replica: bytes (8GiB) or a share of what is free (50%).")
@click.option("--num-blocks", type=click.IntRange(1), default=None, help="KV blocks of each replica, instead of --kv-memory.")
@click.option(
    "--host-kv-bytes", default=None, help="Shared memory for KV blocks that do not fit, for all local replicas together (8GiB)."
)
@click.option(
    "--disk-kv-dir", type=click.Path(file_okay=False), default=None, help="Keep KV blocks there too; they outlive the replicas."
)
@click.option("--disk-kv-bytes", default=None, help="What they may take there. [8GiB]")
@click.option("--max-model-len", type=click.IntRange(2), default=None, help="Tokens of prompt and answer together.")
@click.option("--simulate", is_flag=True, default=None, help="Replicas without a model: real cache, made-up tokens and times.")
@click.option("--engine", "engine_option", multiple=True, metavar="NAME=VALUE", help="Any other option of `turnkeep engine`.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)
@generated_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Serve a model to agents: an OpenAI-compatible API in front of replicas that keep their KV.

    \b
    turnkeep serve --replicas 2                      two replicas of the small model on this machine
    turnkeep serve --model DIR --api-key-file keys   a model of yours, for those who have a key
    turnkeep serve --worker http://10.0.0.5:8100     in front of `turnkeep engine` elsewhere
    """
    console = Console(stderr=True)
    _log_to(console, options["log_level"])
    _allow_connections()
    try:
        plan = plan_from(options, ctx.meta.get("turnkeep.engine", {}))
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error), ctx) from error
    try:
        ctx.exit(asyncio.run(serve(plan, console)))
    except (ListenError, TlsError, ModelFilesError, RecorderError, ReplicaStartError, SessionFileError) as error:
        raise click.ClickException(str(error)) from error


def _allow_connections() -> None:
    """Connections are file descriptors, and the usual soft limit of 1024 is for programs that use select()."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _log_to(console: Console, level: str) -> None:
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def plan_from(options: Mapping[str, Any], engine_table: Mapping[str, Any]) -> ServePlan:
    """The plan that command line, environment and file together describe.

    Raises ConfigError, CheckpointError, and ValueError of the config classes, each with a sentence.
    """
    cache_dir = Path(options["cache_dir"]).absolute()
    workers_file = options["workers_file"]
    discovery = DiscoveryOptions(
        tuple(options["worker"]), str(workers_file) if workers_file is not None else None, dict(os.environ)
    )
    workers, sources = found_workers(discovery)
    token = options["registration_token"] or None
    if token is not None and len(token) < MIN_TOKEN:
        raise ConfigError(f"--registration-token must have at least {MIN_TOKEN} characters, so that nobody guesses it.")
    elsewhere = bool(workers or sources or token)
    replicas = options["replicas"] if options["replicas"] is not None else (0 if elsewhere else 1)
    if replicas == 0 and not elsewhere:
        raise ConfigError(
            "Nothing would generate: give --replicas, or say where workers are: --worker, --workers-file, --registration-token."
        )
    kinds = {spec.kind for spec in workers}.union(*(source.kinds for source in sources))
    opaque_only = replicas == 0 and token is None and kinds == {"openai"}
    auth = AuthConfig(
        keys=tuple(options["api_key"]),
        key_file=Path(options["api_key_file"]).absolute() if options["api_key_file"] is not None else None,
        admin_host=options["admin_host"],
        admin_port=options["admin_port"],
        **generated_values("auth", options),
    )
    ApiKeys(auth)
    http = HttpConfig(
        host=options["host"],
        port=options["port"],
        max_body_bytes=int(options["max_body_mib"] * MIB),
        tls_cert=options["tls_cert"],
        tls_key=options["tls_key"],
        cors_origins=tuple(options["cors_origin"]),
        **generated_values("http", options),
    )
    telemetry = TelemetryConfig(
        otlp_url=options["otlp"], otlp_headers=_headers(options["otlp_header"]), **generated_values("telemetry", options)
    )
    router = RouterConfig(
        policy=options["policy"], shadow_policy=options["shadow_policy"], **generated_values("router", options)
    )
    if router.agree is None:
        router = dataclasses.replace(router, agree=options["processes"] > 1 or bool(options["redis"]))
    # What else is wrong is found before anything is fetched.
    if options["worker_ca"] is not None:
        worker_tls(options["worker_ca"])
    models = _models(options, cache_dir, none=opaque_only)
    pool = PoolConfig(
        models=tuple(model.name for model in models),
        aliases={alias: model.name for model in models for alias in model.aliases},
        router=router,
        ca_file=options["worker_ca"],
        **generated_values("pool", options),
    )
    return ServePlan(
        processes=options["processes"],
        log_level=options["log_level"],
        discovery=discovery,
        gateway=GatewayConfig(
            models=models,
            http=http,
            auth=auth,
            admission=AdmissionConfig(**generated_values("admission", options)),
            session_sources=tuple(options["session_source"]) or DEFAULT_ORDER,
            turns=TurnsConfig(**generated_values("turns", options)),
            misses=MissesConfig(**generated_values("misses", options)),
            gaps=GapConfig(**generated_values("gaps", options)),
            sessions=SessionsConfig(ledger=options["ledger"], **generated_values("sessions", options)),
        ),
        replicas=ReplicaPlan(
            count=replicas,
            arguments=tuple(_engine_arguments(options, engine_table)),
            cache_dir=cache_dir,
            otlp_url=options["otlp"],
        ),
        workers=workers,
        sources=sources,
        registration_token=token,
        fleet=FleetConfig(**generated_values("discovery", options)),
        pool=pool,
        telemetry=telemetry,
        redis=RedisConfig(options["redis"], **generated_values("redis", options)) if options["redis"] else None,
        session_dir=_session_dir(options),
        record=Path(options["record"]).absolute() if options["record"] is not None else None,
    )


def _models(options: Mapping[str, Any], cache_dir: Path, *, none: bool) -> tuple[ModelConfig, ...]:
    """What the gateway renders and tokenises for. `none`: nothing, unless a model is asked for."""
    given, served, also = options["model"], tuple(options["served_model_name"]), tuple(options["also_serve"])
    console = Console(stderr=True)
    models = []
    if given is not None or served or not none:
        given = given if given is not None else DEFAULT_MODEL
        directory = fetch(given, cache_dir, console)
        names = served or (own_name(given, directory),)
        models.append(ModelConfig(names[0], directory, names[1:], options["tool_format"]))
    for text in also:
        name, equals, model = text.partition("=")
        if not equals or not name or not model:
            raise ConfigError(f"--also-serve takes NAME=MODEL, not {text!r}.")
        models.append(ModelConfig(name, fetch(model, cache_dir, console)))
    taken = [name for model in models for name in (model.name, *model.aliases)]
    twice = next((name for name in taken if taken.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"Two models are named '{twice}': rename one with --served-model-name or --also-serve.")
    return tuple(models)


def _engine_arguments(options: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    from cli.engine import command as engine_command

    given: dict[str, Any] = {}
    for text in options["engine_option"]:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--engine takes NAME=VALUE, not {text!r}.")
        given[name.replace("-", "_")] = value
    named = {name: options[name] for name in ENGINE_OPTIONS if options[name] is not None}
    # Checked by where they come from, so that a complaint names the place; then the command line goes before the file.
    for values, where in ((table, "[engine]"), (given, "--engine"), (named, "serve")):
        engine_arguments(engine_command, values, where)
    merged = {**{key.replace("-", "_"): value for key, value in table.items()}, **given, **named}
    return engine_arguments(engine_command, merged, "engine")


def _session_dir(options: Mapping[str, Any]) -> Path | None:
    directory = None if options["session_dir"] is None else Path(options["session_dir"]).absolute()
    if directory is not None and (options["redis"] or options["processes"] > 1):
        raise ConfigError(
            "sessions.directory (--session-dir) is for a gateway of one process; with --redis or --processes use Redis."
        )
    return directory


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError("--otlp-header takes NAME=VALUE.")
        headers[name] = value
    return headers
