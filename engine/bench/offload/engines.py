"""Engines of one model with pools and tiers of every size. The weights are loaded once: no two of them may compute at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig, Policy
from engine.engine import Engine
from engine.forward_choice import choose_forward, row_chooser
from engine.kv_layout import KVLayout
from engine.loading import load_configured
from engine.sampling.sampler import Sampler
from offload.config import OffloadConfig
from offload.files import Files
from prefix_cache.eviction import EvictionPolicy


class Engines:
    """Makes engines. Whoever gets one closes it."""

    def __init__(self, config: EngineConfig, cache_dir: Path) -> None:
        """config: without what is said of each engine. Raises CheckpointError and ConfigError."""
        self._config = config
        self._cache_dir = cache_dir
        self._model = load_configured(config, cache_dir)
        self.block_bytes = KVLayout.of(self._model, config.block_size, config.kv_dtype).block_bytes
        self.block_size = config.block_size
        self.vocab_size = self._model.spec.vocab_size
        self.context = self._model.spec.max_context
        self._forward = choose_forward(config, self._model.decoder, cache_dir / "kernels")

    def make(
        self,
        num_blocks: int,
        max_model_len: int,
        offload: OffloadConfig | None = None,
        eviction: EvictionPolicy | None = None,
        policy: Policy | None = None,
        files: Files | None = None,
    ) -> Engine:
        """An engine, warmed up. policy: None for that of the configuration. files: of the disk tier; None for the system's."""
        model, forward = self._model, self._forward
        engine = Engine(
            replace(self._config, num_blocks=num_blocks, policy=policy or self._config.policy),
            model,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            forward=forward,
            sampler=Sampler(model.spec.vocab_size, model.decoder.device, row_chooser(forward)),
            offload=offload,
            eviction=eviction,
            files=files,
        )
        engine.warm_up()
        return engine
