"""From a configuration to a draft model that is ready to guess."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.checkpoints.progress import Report, silent
from engine.config import ConfigError, DraftModelConfig, EngineConfig
from engine.forward import Forward
from engine.forward_choice import choose_forward
from engine.kv_layout import KVLayout
from engine.kv_memory import GIB, KVBudget
from engine.models.registry import LoadedModel, load_model
from engine.runner import Runner
from engine.sampling.sampler import Sampler
from engine.speculation.draft_model import DraftModel

logger = logging.getLogger(__name__)

SHARE = 8
"""The draft model gets one part in so many of the KV memory, where nobody says how much."""


class LoadedDraft:
    """Weights and forward pass. KV memory comes last, when it is known how much there is."""

    def __init__(
        self, config: EngineConfig, draft: DraftModelConfig, target: LoadedModel, model: LoadedModel, forward: Forward
    ):
        self._config = config
        self._draft = draft
        self._target = target
        self._model = model
        self._forward = forward
        self._layout = KVLayout.of(model, config.block_size)

    def share(self, budget: KVBudget) -> tuple[KVBudget, int]:
        """What is left of the first model's KV memory, and how many blocks the draft model gets. Where the number of blocks was
        given it stays, and the draft model's come on top of it. Raises ConfigError when there are not two."""
        own = self._layout.block_bytes
        if self._draft.kv_bytes is not None:
            blocks = self._draft.kv_bytes // own
        else:
            # No more than what the tokens of the first model's memory would take.
            blocks = min(budget.num_blocks * budget.block_bytes // SHARE // own, budget.num_blocks)
        left = budget.num_blocks
        if self._config.num_blocks is None:
            left -= -(-blocks * own // budget.block_bytes)
        if blocks < 2 or left < 1:
            raise ConfigError(
                f"The draft model's KV memory holds {blocks} blocks of {own} bytes and leaves the model {left} of "
                f"{budget.block_bytes}; raise the KV memory, or give the draft model another part of it (draft-kv-memory)."
            )
        return replace(budget, num_blocks=left), blocks

    def drafter(self, num_blocks: int, sampler: Sampler) -> DraftModel:
        """Allocates the KV memory. sampler: of the model that is drafted for."""
        spec, size = self._model.spec, self._config.block_size
        logger.info(
            "Draft model %s (%s): guesses up to %d tokens at once; KV memory: %d blocks of %d tokens = %d tokens, %.2f GiB.",
            self._draft.model.name,
            "as it is" if self._draft.quantization == "none" else self._draft.quantization,
            self._draft.tokens,
            num_blocks,
            size,
            num_blocks * size,
            num_blocks * self._layout.block_bytes / GIB,
        )
        return DraftModel(
            Runner(self._forward, self._layout.allocate(num_blocks)),
            sampler,
            num_blocks=num_blocks,
            block_size=size,
            vocab_size=self._target.spec.vocab_size,
            draft_vocab_size=spec.vocab_size,
            max_position=spec.max_context,
            max_tokens=self._draft.tokens,
            max_step_tokens=self._config.max_num_batched_tokens,
        )


def load_draft(
    config: EngineConfig,
    draft: DraftModelConfig,
    target: LoadedModel,
    *,
    dtype: torch.dtype,
    kernel_dir: Path,
    cache_dir: Path | None = None,
    report: Report = silent,
) -> LoadedDraft:
    """Raises CheckpointError for a model that cannot be loaded, and ConfigError for one that has other tokens."""
    check_same_tokens(config.model, draft.model)
    model = load_model(
        draft.model, dtype=dtype, device=config.device, quantization=draft.quantization, cache_dir=cache_dir, report=report
    )
    own = replace(config, model=draft.model, quantization=draft.quantization, draft=None)
    return LoadedDraft(config, draft, target, model, choose_forward(own, model.decoder, kernel_dir))


def check_same_tokens(model: Path, draft: Path) -> None:
    """Raises ConfigError unless both directories have a tokenizer, and ids mean the same text in both."""
    ours, theirs = _tokens(model), _tokens(draft)
    for token_id in range(max(len(ours), len(theirs))):
        one, other = ours.get(token_id), theirs.get(token_id)
        if one != other:
            raise ConfigError(
                f"The draft model {draft.name} has other tokens than {model.name}: id {token_id} is {_named(other)} there and "
                f"{_named(one)} here. Give a draft model with the same tokenizer, a smaller one of the same family."
            )


def _tokens(directory: Path) -> dict[int, str]:
    path = directory / "tokenizer.json"
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises plain Exception
        reason = "is missing" if not path.exists() else f"cannot be read ({error})"
        raise ConfigError(
            f"{path} {reason}, so nobody knows whether the draft model has the same tokens; fetch the model again."
        ) from error
    return {token_id: token for token, token_id in vocabulary.items()}


def _named(token: str | None) -> str:
    return "no token" if token is None else repr(token)
