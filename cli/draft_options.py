"""Options of `turnkeep engine` about tokens that are guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.sizes import MemorySize
from engine.quantization.names import QUANTIZATIONS

if TYPE_CHECKING:
    from engine.config import DraftModelConfig

Command = Callable[..., Any]

_OPTIONS: tuple[Callable[[Command], Command], ...] = (
    click.option("--max-draft-tokens", type=click.IntRange(0), default=None, help="Tokens guessed ahead at once; 0: none. [8]"),
    click.option(
        "--max-draft-batch", type=click.IntRange(0), default=None, help="Running sequences beyond which none are. [4]"
    ),
    click.option(
        "--draft-model",
        default=None,
        metavar="NAME|DIR|FILE.gguf",
        help="A smaller model with the same tokens that guesses for the model, as long as that is measured to pay.",
    ),
    click.option("--draft-tokens", type=click.IntRange(1), default=None, help="Tokens it guesses at once. [4]"),
    click.option("--draft-quantization", type=click.Choice(QUANTIZATIONS), default=None, help="Of its weights. [none]"),
    click.option("--draft-kv-memory", type=MemorySize(), default=None, help="Its KV blocks, in bytes. [1/8 of --kv-memory]"),
)


def draft_options(command: Command) -> Command:
    """Adds them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_draft(options: Mapping[str, Any]) -> None:
    """Raises UsageError for combinations that mean nothing."""
    if options["draft_model"] is None:
        for name in ("draft_tokens", "draft_quantization", "draft_kv_memory"):
            if options[name] is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} is about a draft model; name one with --draft-model.")
    elif options["simulate"]:
        raise click.UsageError("A simulated replica has nothing to guess; leave --draft-model out.")
    if isinstance(options["draft_kv_memory"], float):
        raise click.UsageError("--draft-kv-memory is a number of bytes, not a share.")
    for name in ("max_draft_tokens", "max_draft_batch"):
        if options["draft_model"] is not None and options[name] == 0:
            raise click.UsageError(f"--draft-model guesses nothing with --{name.replace('_', '-')} 0; leave one of them out.")


def draft_config(options: Mapping[str, Any], fetch: Callable[[str, bool], Path]) -> DraftModelConfig | None:
    """None without a draft model. fetch: the directory of a model, with the blocks of its GGUF file or without. Raises
    CheckpointError."""
    if options["draft_model"] is None:
        return None
    from engine.config import DraftModelConfig

    given = {"tokens": "draft_tokens", "quantization": "draft_quantization", "kv_bytes": "draft_kv_memory"}
    return DraftModelConfig(
        model=fetch(options["draft_model"], options["draft_quantization"] == "gguf"),
        **{field: options[name] for field, name in given.items() if options[name] is not None},
    )
