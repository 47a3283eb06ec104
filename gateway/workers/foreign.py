"""Names for the blocks of workers that do not hash as we do."""

from __future__ import annotations

from prefix_cache.hashing import BlockHash, namespace_digest


def foreign_namespace(model: str, block_size: int) -> BlockHash:
    """The root under which the gateway hashes the prompts of a model whose workers hash in their own way.

    Nothing but the index goes by it: KV of such workers is never moved. So all that must agree is the tokens of a model, and
    the size of their blocks.
    """
    return namespace_digest({"foreign": True, "model": model, "block_size": block_size})


def adapter_namespace(base: BlockHash, adapter: str) -> BlockHash:
    """The root of the prompts of an adapter over the model whose root is `base`."""
    return namespace_digest({"base": base.hex(), "adapter": adapter})
