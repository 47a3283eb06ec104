"""What a KV block is in memory: its dtype, its shape, its bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import KVDTypeName
from engine.kernels import int8_kv
from engine.models.registry import LoadedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV memory of a model is a tensor [block, *block_shape] of `dtype` on `device`; block_shape is
    (layer, k and v, kv head, token, dim), where int8 has 4 bytes more than dims (engine/kernels/int8_kv.py)."""

    dtype: torch.dtype
    device: torch.device
    block_shape: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, model: LoadedModel, block_size: int, kv_dtype: KVDTypeName = "auto") -> KVLayout:
        """`kv_dtype` auto: as the weights. Raises ValueError for a model whose layers differ in their KV heads: one block could
        not hold them all."""
        shapes = {(spec.num_kv_heads, spec.head_dim) for spec in model.spec.attention}
        if len(shapes) != 1:
            raise ValueError(
                f"The layers of this model have KV of {len(shapes)} shapes; only models with one shape can be served."
            )
        ((kv_heads, dim),) = shapes
        dtype = model.decoder.dtype if kv_dtype == "auto" else _DTYPES[kv_dtype]
        width = dim + int8_kv.SCALE_BYTES if dtype == torch.int8 else dim
        return cls(dtype, model.decoder.device, (len(model.spec.attention), 2, kv_heads, block_size, width))

    @property
    def block_bytes(self) -> int:
        layers, sides, kv_heads, block_size, width = self.block_shape
        return layers * sides * kv_heads * block_size * width * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> torch.Tensor:
        """Not initialised: the operating system commits its pages as they are first written, and no kernel reads what was not
        written."""
        return torch.empty((num_blocks, *self.block_shape), dtype=self.dtype, device=self.device)
