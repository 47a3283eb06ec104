"""How an engine is set up. Parsed once at the command line, checked here, passed down."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from engine.quantization.names import QUANTIZATIONS, QuantizationName
from engine.session_door import DoorConfig
from prefix_cache.hashing import DEFAULT_BLOCK_SIZE

DTypeName = Literal["auto", "bfloat16", "float16", "float32"]
KVDTypeName = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Policy = Literal["fcfs", "priority", "sessions"]
Kernels = Literal["auto", "reference"]

GRAPH_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)


class ConfigError(ValueError):
    """A setting that cannot work. The message names it and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """A second model that guesses tokens for the first (engine.speculation.draft_model).

    model: a local Hugging Face directory; it has the same tokens. tokens: guessed at once. quantization: of its weights.
    kv_bytes: its KV memory (None: an eighth of the first model's, and no more than that would need for the tokens it holds).
    """

    model: Path
    tokens: int = 4
    quantization: QuantizationName = "none"
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.tokens < 1:
            raise ConfigError(f"draft tokens is {self.tokens}; it must be at least 1, or leave the draft model out.")
        if self.kv_bytes is not None and self.kv_bytes < 1:
            raise ConfigError(f"draft kv_bytes is {self.kv_bytes}; it must be at least 1.")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"draft quantization is {self.quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    model: a local Hugging Face directory. model_name: what it is called to the outside (default: the directory's name).
    dtype: of weights; auto is bfloat16 where the CPU multiplies it natively, else float32. kv_dtype: of KV memory; auto is the
    weights' dtype, int8 keeps a scale beside each key and value and takes about half of bfloat16's memory. quantization: of the
    matrices of the layers and the head, which then take fewer bits than `dtype`: int8 (one scale for each output), int4 (groups
    of 32 inputs; the head in int8), or gguf, the blocks of the GGUF file that the model came from.

    KV memory, first that is given: `num_blocks`; `kv_memory_bytes`; `kv_memory_fraction` of the memory that is available once
    the model is loaded, less what the largest step needs, which is measured.

    max_model_len: tokens of prompt and generation together (default: the model's context, or what the KV memory holds if
    that is less). max_num_seqs: choices that run at once. max_num_batched_tokens: tokens a step computes at most; a longer
    prefill is spread over several steps, beside which others go on decoding.

    policy: fcfs; priority (lower first, ties by arrival); or sessions: those that do not fit wait at the door
    (engine.session_door), and while any do, turns of sessions that began earlier go first, though no request is overtaken by
    more than `overtakes` that came after it; without a `door` they always do. threads: that compute (None: as torch finds).
    kernels: auto is the fastest that the machine can build, reference is plain torch. graph_batch_sizes: on an NVIDIA GPU, the
    numbers of sequences for which a decode step is captured as a graph, ascending; those beyond `max_num_seqs` are left out,
    and none turns it off.

    max_draft_tokens: tokens guessed for a sequence in one step and verified in one pass (engine.speculation); 0: none.
    max_draft_batch: running sequences beyond which nothing is guessed. draft: a second model that guesses (None: none).
    """

    model: Path
    model_name: str | None = None
    dtype: DTypeName = "auto"
    kv_dtype: KVDTypeName = "auto"
    quantization: QuantizationName = "none"
    device: str = "cpu"
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    kv_memory_fraction: float = 0.4
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefix_caching: bool = True
    policy: Policy = "sessions"
    overtakes: int = 64
    door: DoorConfig | None = field(default_factory=DoorConfig)
    threads: int | None = None
    kernels: Kernels = "auto"
    graph_batch_sizes: tuple[int, ...] = GRAPH_BATCH_SIZES
    max_draft_tokens: int = 8
    max_draft_batch: int = 4
    draft: DraftModelConfig | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for name in ("block_size", "num_blocks", "kv_memory_bytes", "max_model_len", "max_num_seqs", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        for name in ("max_draft_tokens", "max_draft_batch"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more.")
        if self.draft is not None and not (self.max_draft_tokens and self.max_draft_batch):
            raise ConfigError("A draft model guesses nothing where max_draft_tokens or max_draft_batch is 0; raise it.")
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError(f"kv_memory_fraction is {self.kv_memory_fraction}; it must be above 0 and at most 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs, {self.max_num_seqs}; "
                "every running sequence needs one token a step: raise the former or lower the latter."
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("max_model_len is 1; a prompt and one generated token need at least 2.")
        if self.policy not in ("fcfs", "priority", "sessions"):
            raise ConfigError(f"policy is {self.policy!r}; it must be fcfs, priority or sessions.")
        if self.kernels not in ("auto", "reference"):
            raise ConfigError(f"kernels is {self.kernels!r}; it must be auto or reference.")
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ConfigError(f"dtype is {self.dtype!r}; it must be auto, bfloat16, float16 or float32.")
        if self.kv_dtype not in ("auto", "float32", "bfloat16", "float16", "int8"):
            raise ConfigError(f"kv_dtype is {self.kv_dtype!r}; it must be auto, float32, bfloat16, float16 or int8.")
        sizes = self.graph_batch_sizes
        if any(size < 1 for size in sizes) or any(low >= high for low, high in pairwise(sizes)):
            raise ConfigError(
                f"graph_batch_sizes is {', '.join(map(str, sizes))}; it must be ascending numbers of at least 1, each once."
            )
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization is {self.quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}.")
