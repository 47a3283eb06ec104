"""From a configuration to an engine that is ready to run."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.checkpoints.cache import default_cache_dir
from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.progress import Report, silent
from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from engine.forward_choice import choose_forward, graph_capture, row_chooser
from engine.kv_memory import KVBudget, kv_budget
from engine.measurements import Measurements
from engine.models.registry import LoadedModel, load_model
from engine.sampling.sampler import Sampler
from engine.speculation.draft_loading import load_draft
from engine.speculation.drafts import Drafter
from engine.speculation.ngram_drafter import NGramDrafter
from engine.startup import StartupClock, describe
from grammar.compiler import GrammarCompiler
from grammar.detokenizer import Detokenizer
from grammar.known_sources import KnownSources
from grammar.warming import warm_up
from offload.config import OffloadConfig

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype of weights and KV: auto is bfloat16 where the device multiplies it natively, else float32."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if torch.device(config.device).type != "cpu":
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities()
    native = capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
    return torch.bfloat16 if native else torch.float32


def load_configured(config: EngineConfig, cache_dir: Path | None, report: Report = silent) -> LoadedModel:
    """The model of a configuration, as it says. Sets torch's threads if configured. Raises CheckpointError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return load_model(
        config.model,
        dtype=resolve_dtype(config),
        device=config.device,
        quantization=config.quantization,
        cache_dir=cache_dir,
        report=report,
    )


def load_engine(
    config: EngineConfig,
    *,
    cache_dir: Path | None = None,
    report: Report = silent,
    clock: StartupClock | None = None,
    offload: OffloadConfig | None = None,
    known_tools: Path | None = None,
) -> Engine:
    """Loads the model of a configuration, sizes its KV memory, makes the engine and warms it up. Sets torch's threads if
    configured.

    cache_dir: where digests of weight files, built kernels and measurements are kept (default: the user's cache directory).
    clock: what the start took up to here. offload: the tiers below the device. known_tools: where grammars of tool lists are
    remembered, to be compiled in the background at the next start (default: nowhere). Raises CheckpointError for a model
    that cannot be loaded and ConfigError for settings that do not fit it or this machine.
    """
    clock = StartupClock() if clock is None else clock
    cache = cache_dir or default_cache_dir()
    model = load_configured(config, cache_dir, report)
    spec = model.spec
    if config.max_model_len is not None and config.max_model_len > spec.max_context:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at {spec.max_context}; lower it."
        )
    clock.enter("compile")
    forward = choose_forward(config, model.decoder, cache / "kernels")
    clock.enter("warm_up")
    sampler = Sampler(spec.vocab_size, model.decoder.device, row_chooser(forward))
    draft = None
    if config.draft is not None:
        draft = load_draft(
            config,
            config.draft,
            model,
            dtype=resolve_dtype(config),
            kernel_dir=cache / "kernels",
            cache_dir=cache_dir,
            report=report,
        )
    budget = kv_budget(config, model, forward, sampler, Measurements(cache / "measurements"))
    drafters: list[Drafter] | None = None
    if draft is not None:
        budget, draft_blocks = draft.share(budget)
        draft_model = draft.drafter(draft_blocks, sampler)
        draft_model.warm_up()
        drafters = [NGramDrafter(), draft_model]
    max_model_len = _max_model_len(config, model, budget)
    logger.info("%s", budget.describe(config.block_size, max_model_len))
    clock.enter("load")
    tokenizer_json = config.model / "tokenizer.json"
    tokenizer = _tokenizer(tokenizer_json)
    known = None
    grammars = None
    if tokenizer is not None:
        if known_tools is not None:
            known = KnownSources(
                known_tools, tokenizer_json.read_bytes() + repr((spec.vocab_size, spec.eos_token_ids)).encode()
            )
        grammars = GrammarCompiler(tokenizer_json, spec.vocab_size, spec.eos_token_ids, known=known)
    engine = Engine(
        config,
        model,
        num_blocks=budget.num_blocks,
        max_model_len=max_model_len,
        forward=forward,
        sampler=sampler,
        grammars=grammars,
        detokenizer=None if tokenizer is None else Detokenizer(tokenizer),
        drafters=drafters,
        graph_capture=graph_capture(forward),
        offload=offload,
    )
    clock.enter("warm_up")
    engine.warm_up()
    if grammars is not None and known is not None:
        warm_up(grammars, known.all())
    seconds = clock.seconds()
    engine.started_in(seconds)
    logger.info("%s %s", engine.info.model, describe(seconds))
    return engine


def _max_model_len(config: EngineConfig, model: LoadedModel, budget: KVBudget) -> int:
    """What was asked for, or the model's context, or what the KV memory holds if that is less."""
    held = budget.num_blocks * config.block_size
    if config.max_model_len is not None:
        if config.max_model_len > held:
            logger.warning(
                "max_model_len is %d, but the KV memory holds %d tokens; longer requests are refused.",
                config.max_model_len,
                held,
            )
        return config.max_model_len
    if held < model.spec.max_position:
        logger.warning(
            "The model's context is %d tokens, but the KV memory holds %d; the context is cut to that.",
            model.spec.max_position,
            held,
        )
    return max(2, min(model.spec.max_position, held))


def _tokenizer(path: Path) -> Tokenizer | None:
    if not path.exists():
        logger.warning("%s is missing: grammars and stop strings are refused.", path)
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}. Fetch the model again.") from error
