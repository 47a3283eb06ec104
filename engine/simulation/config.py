"""What a simulated replica pretends to be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from engine.config import ConfigError
from offload.config import OffloadConfig

LETTER_TOKENS = tuple(range(64, 90))
"""Ids of printable ASCII characters in every byte-level BPE vocabulary: `a` to `z` where bytes come first (GPT-2, Llama 3,
Qwen), `P` to `i` where 17 special tokens precede them (SmolLM2)."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds that a step takes: step + what each sequence in it adds.

    A sequence adds `prefill_token` per prompt token and `prefill_pair` per pair of such a token and one before it, or, for
    one generated token, `decode_sequence` and `decode_context_token` per token before it.

    The defaults lie where an 8B model in bf16 on one 80 GB GPU does: 16 GB of weights at 2.7 TB/s, 16 GFLOP a token and
    0.5 MFLOP a pair at 400 TFLOP/s, 128 KiB of KV a token.
    """

    step: float = 0.006
    prefill_token: float = 4e-5
    prefill_pair: float = 1.3e-9
    decode_sequence: float = 4e-5
    decode_context_token: float = 5e-8

    def __post_init__(self) -> None:
        for name in ("step", "prefill_token", "prefill_pair", "decode_sequence", "decode_context_token"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is a number of seconds and must be finite and not negative, not {value}")

    def prefill_seconds(self, new: int, context: int) -> float:
        """What `new` prompt tokens after `context` computed ones add to a step."""
        return self.prefill_token * new + self.prefill_pair * new * (context + (new - 1) / 2)

    def decode_seconds(self, context: int) -> float:
        """What one token after `context` others adds to a step."""
        return self.decode_sequence + self.decode_context_token * context


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """`num_blocks` of `block_size` tokens; the scheduler's limits are those of the real engine.

    `time_scale` multiplies every duration (0: no waiting at all). A choice without `ignore_eos` ends on its own after
    `mean_output_tokens` tokens in the mean (0: only by its limits). `token_ids` are what it generates, chosen by digest of
    what stands before and `seed`. `accept_grammars`: True takes requests with a grammar and generates as if there were none
    (what comes out is not valid against it); False says so in the capabilities and refuses them.

    `offload`: tiers below the device, of `kv_token_bytes` a token, from which blocks come at `host_rate` and `disk_rate` bytes
    a second (engine.simulation.tiers); its codecs and its Redis mean nothing here.
    """

    model: str = "simulated"
    block_size: int = 16
    num_blocks: int = 32_768
    max_model_len: int = 131_072
    vocab_size: int = 49_152
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = True
    cost: CostModel = field(default_factory=CostModel)
    time_scale: float = 1.0
    mean_output_tokens: int = 128
    seed: int = 0
    token_ids: tuple[int, ...] = LETTER_TOKENS
    eos_token_ids: tuple[int, ...] = (2,)
    accept_grammars: bool = False
    offload: OffloadConfig | None = None
    kv_token_bytes: int = 131_072
    host_rate: float = 20e9
    disk_rate: float = 3e9

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "max_model_len",
            "vocab_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_token_bytes",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}), "
                "so that every running sequence gets its token in every step"
            )
        if not (math.isfinite(self.time_scale) and self.time_scale >= 0):
            raise ConfigError(f"time_scale must be finite and not negative, not {self.time_scale}")
        for name in ("host_rate", "disk_rate"):
            rate = getattr(self, name)
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(f"{name} is a number of bytes a second and must be finite and above 0, not {rate}")
        if self.mean_output_tokens < 0:
            raise ConfigError(f"mean_output_tokens must not be negative, not {self.mean_output_tokens}")
        if self.scheduling not in ("fcfs", "priority"):
            raise ConfigError(f"scheduling is fcfs or priority, not {self.scheduling}")
        if not self.token_ids:
            raise ConfigError("token_ids must name at least one token to generate")
        for name in ("token_ids", "eos_token_ids"):
            beyond = [token for token in getattr(self, name) if not 0 <= token < self.vocab_size]
            if beyond:
                raise ConfigError(f"{name} has {beyond[0]}, outside of a vocabulary of {self.vocab_size} tokens")
