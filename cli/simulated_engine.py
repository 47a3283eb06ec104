"""A simulated replica: its options, and how it is made of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from cli.sizes import fields_given
from cli.tier_options import offload_config
from engine.checkpoints import CheckpointError, resolve
from engine.core import EngineCore

logger = logging.getLogger(__name__)

Command = Callable[..., Any]


class _Simulated(click.Option):
    """An option that only means something with --simulate."""


def _sim_option(*names: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(*names, cls=_Simulated, **settings)


_OPTIONS: tuple[Callable[[Command], Command], ...] = (
    click.option("--simulate", is_flag=True, help="No model: real scheduling, cache and events, made-up tokens and times."),
    _sim_option(
        "--sim-tokens-from", default=None, metavar="NAME|DIR", help="Generate words of this model's tokenizer. [--model's]"
    ),
    _sim_option("--sim-vocab-size", type=click.IntRange(1), default=None, help="Size of the vocabulary. [49152, or --model's]"),
    _sim_option("--sim-time-scale", type=click.FloatRange(0), default=None, help="Multiplies every duration; 0: none. [1]"),
    _sim_option(
        "--sim-output-tokens", type=click.IntRange(0), default=None, help="Mean length of answers; 0: no end token. [128]"
    ),
    _sim_option("--sim-seed", type=int, default=None, help="Which tokens are drawn. [0]"),
    _sim_option(
        "--sim-grammars", type=click.Choice(["refuse", "ignore"]), default=None, help="Requests with a grammar. [refuse]"
    ),
    _sim_option("--sim-step", type=click.FloatRange(0), default=None, help="Seconds of any step. [0.006]"),
    _sim_option("--sim-prefill-token", type=click.FloatRange(0), default=None, help="Seconds a prompt token adds. [4e-5]"),
    _sim_option("--sim-prefill-pair", type=click.FloatRange(0), default=None, help="... and each token before it. [1.3e-9]"),
    _sim_option("--sim-decode-sequence", type=click.FloatRange(0), default=None, help="Seconds a generated token adds. [4e-5]"),
    _sim_option("--sim-decode-context", type=click.FloatRange(0), default=None, help="... and each token before it. [5e-8]"),
    _sim_option(
        "--sim-kv-token-bytes", type=click.IntRange(1), default=None, help="What a token's KV takes in tiers. [131072]"
    ),
    _sim_option("--sim-host-rate", type=click.FloatRange(1), default=None, help="Bytes a second from host memory. [20e9]"),
    _sim_option("--sim-disk-rate", type=click.FloatRange(1), default=None, help="Bytes a second from disk. [3e9]"),
)


def simulation_options(command: Command) -> Command:
    """Adds them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_simulated(ctx: click.Context, options: Mapping[str, Any]) -> None:
    """Raises UsageError for combinations that mean nothing."""
    if not options["simulate"]:
        for parameter in ctx.command.params:
            if isinstance(parameter, _Simulated) and parameter.name and options[parameter.name] is not None:
                raise click.UsageError(f"{parameter.opts[0]} only means something with --simulate.")
    elif options["scheduling"] == "sessions":
        raise click.UsageError("A simulated replica has no order of sessions; give --scheduling fcfs or priority.")
    elif options["kv_memory"] is not None:
        raise click.UsageError("A simulated replica has no KV memory to size; give --num-blocks instead of --kv-memory.")


def simulated(options: Mapping[str, Any]) -> Callable[[], EngineCore[Any]]:
    """What makes it."""

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
            offload=offload_config(options),
            cost=replace(config.cost, **{costs[name]: options[name] for name in costs if options[name] is not None}),
            **fields_given(
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
