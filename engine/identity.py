"""Who an engine is: the namespace of its KV, and what it says of itself."""

from __future__ import annotations

import secrets

from engine.config import EngineConfig
from engine.kv_layout import KVLayout
from engine.models.registry import LoadedModel
from gateway.workers.protocol import PROTOCOL_VERSION, Capabilities, WorkerInfo
from prefix_cache.hashing import namespace_digest


def namespace_of(model: LoadedModel, layout: KVLayout, block_size: int) -> bytes:
    """What makes KV interchangeable. The fingerprint covers weights, rope settings and whatever else of the model shapes it."""
    return namespace_digest(
        {
            "weights": model.fingerprint,
            "dtype": str(model.decoder.dtype),
            "kv_dtype": str(layout.dtype),
            "block_size": block_size,
        }
    )


def worker_info(
    config: EngineConfig, namespace: bytes, *, num_blocks: int, max_model_len: int, vocab_size: int, grammars: bool
) -> WorkerInfo:
    """Of a new life: the instance is drawn."""
    return WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        instance=secrets.token_hex(16),
        model=config.model_name or config.model.name,
        namespace=namespace.hex(),
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        max_concurrency=config.max_num_seqs,
        capabilities=Capabilities(
            grammars=grammars,
            kv_events=config.prefix_caching,
            retention_hints=True,
            supersede=True,
            prompt_prefixes=True,
            gather=True,
            resume=True,
        ),
    )
