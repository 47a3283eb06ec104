"""A whole forward pass in one call (decoder.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from engine.cancelling import Cancellation, ForwardCancelledError
from engine.kernels.cpu.kernel import KV_DTYPES
from engine.kernels.cpu.library import AttentionArgs, Library, Team
from engine.kernels.cpu.matrix import Format, MatrixStruct, PackedMatrix, Slabs, pack
from engine.kernels.cpu.methods import Choose, MethodStruct
from engine.kernels.interface import AttentionSpec, StepBatch
from engine.quantization.matrix import QuantizedMatrix

_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32

Weight: TypeAlias = torch.Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's weights as a checkpoint has them, row-major: qkv [(heads + 2 kv heads) dim, hidden], out [hidden, heads dim],
    gate_up [2 inner, hidden] (gate first), down [hidden, inner]; norms [hidden] or, over heads, [dim]."""

    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """A decoder's weights: embedding and head [vocab, hidden]; cos and sin float32 [positions, dim / 2].

    `layers` is read once and one at a time, so that a generator need not hold a second copy of the model.
    """

    embedding: torch.Tensor
    layers: Iterable[LayerTensors]
    intermediate_size: int
    norm: torch.Tensor
    head: Weight
    cos: torch.Tensor
    sin: torch.Tensor
    norm_epsilon: float


class _LayerWeights(ctypes.Structure):
    """Mirrors LayerWeights of decoder.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _pointer) for name in ("qkv_bias", "input_norm", "post_norm", "q_norm", "k_norm")),
        ("window", _int64),
    )


class _ForwardArgs(ctypes.Structure):
    """Mirrors ForwardArgs of decoder.h."""

    _fields_ = (
        ("attention", AttentionArgs),
        *((name, _pointer) for name in ("layers", "embedding")),
        ("head", MatrixStruct),
        *((name, _pointer) for name in ("final_norm", "token_ids", "positions", "slots", "cos", "sin", "logit_rows", "logits")),
        ("cancelled", _pointer),
        ("kv_layer", _int64),
        *((name, _int32) for name in ("num_layers", "num_tokens", "hidden", "intermediate", "vocab", "num_logit_rows")),
        ("embedding_dtype", _int32),
        ("norm_epsilon", ctypes.c_float),
        ("choices", MethodStruct * len(Format)),
    )


_CANCELLED = 3


def unfit(specs: Sequence[AttentionSpec], hidden: int, inner: int) -> str | None:
    """Why a model of this shape cannot run here, or None when it can: products take 32 inputs at a time."""
    first = specs[0]
    if any((s.num_heads, s.num_kv_heads, s.head_dim, s.scale) != _shape(first) for s in specs):
        return "its layers differ in shape"
    for name, size in (
        ("hidden_size", hidden),
        ("intermediate_size", inner),
        ("num_attention_heads * head_dim", first.num_heads * first.head_dim),
    ):
        if size % 32:
            return f"{name} {size} is no multiple of 32"
    return None


def _shape(spec: AttentionSpec) -> tuple[int, int, int, float]:
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale


class NativeDecoder:
    """The weights, packed in the order in which products read them; `run` computes a batch over paged KV.

    The residual stream and whatever stands between products is float32. A row's result does not depend on the other rows of its
    batch where one method multiplies its format at any number of rows (float32), but for how a long context is split over
    threads.
    """

    def __init__(
        self,
        library: Library,
        team: Team,
        specs: Sequence[AttentionSpec],
        tensors: DecoderTensors,
        choose: Choose,
        format_of: Callable[[Weight], Format],
    ) -> None:
        """`format_of`: how a weight is packed; `choose`: what multiplies each format. Raises ValueError for a model that
        `unfit` names."""
        hidden, inner = tensors.embedding.shape[1], tensors.intermediate_size
        reason = unfit(specs, hidden, inner)
        if reason is not None:
            raise ValueError(reason)
        self._library = library
        self._team = team
        self._spec = specs[0]
        self._format_of = format_of
        self._slabs = Slabs()
        self._hidden, self._inner, self._vocab = hidden, inner, tensors.embedding.shape[0]
        self._epsilon = tensors.norm_epsilon
        self._flag: Cancellation | None = None
        self._owned: list[torch.Tensor | PackedMatrix] = []  # what the pointers below point into
        self._cos, self._sin = self._float(tensors.cos), self._float(tensors.sin)
        self._embedding = self._own(tensors.embedding)
        self._embedding_dtype = KV_DTYPES[tensors.embedding.dtype]
        self._head = self._pack(tensors.head)
        self._norm = self._float(tensors.norm)
        self._layers = (_LayerWeights * len(specs))()
        for index, (layer, spec) in enumerate(zip(tensors.layers, specs, strict=True)):
            self._layers[index] = _LayerWeights(
                qkv=self._pack(layer.qkv),
                out=self._pack(layer.out),
                gate_up=self._pack(layer.gate_up, paired=True),
                down=self._pack(layer.down),
                qkv_bias=self._float(layer.qkv_bias),
                input_norm=self._float(layer.input_norm),
                post_norm=self._float(layer.post_norm),
                q_norm=self._float(layer.q_norm),
                k_norm=self._float(layer.k_norm),
                window=spec.window or 0,
            )

        self._choices = (MethodStruct * len(Format))()
        for matrix_format in self.formats:
            self._choices[matrix_format] = choose(matrix_format).struct()

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats that the weights are packed in."""
        return tuple(sorted({owned.format for owned in self._owned if isinstance(owned, PackedMatrix)}))

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed matrices."""
        return sum(owned.nbytes for owned in self._owned if isinstance(owned, PackedMatrix))

    @property
    def library(self) -> Library:
        """What it was built with."""
        return self._library

    @property
    def team(self) -> Team:
        """The threads that it computes on."""
        return self._team

    def cancel_by(self, flag: Cancellation) -> None:
        """Looks at this flag between layers from now on."""
        self._flag = flag

    def _own(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._owned.append(tensor)
        return tensor.data_ptr()

    def _float(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._own(tensor.float())

    def _pack(self, weight: Weight, *, paired: bool = False) -> MatrixStruct:
        packed = pack(self._library, weight, self._format_of(weight), paired=paired, slabs=self._slabs)
        self._owned.append(packed)
        return packed.struct

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Computes a batch, writing its KV. kv: [block][layer][k, v][kv head][token][dim] (interface.py).

        Returns the logits that follow the tokens in `rows` of the batch, float32 [len(rows), vocabulary]. Positions must lie
        within the tables of cosines and ids within the vocabulary; they are not checked. Raises ForwardCancelledError.
        """
        spec = self._spec
        logits = torch.empty((len(rows), self._vocab), dtype=torch.float32)
        logit_rows = torch.tensor(rows, dtype=torch.int64)
        block, layer, side, head, token, _ = kv.stride()
        attention = AttentionArgs(
            kv=kv.data_ptr(),
            query_start=batch.query_start.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            kv_block=block,
            kv_side=side,
            kv_head=head,
            kv_token=token,
            table_stride=batch.block_tables.stride(0),
            team=self._team.handle,
            num_sequences=batch.num_sequences,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=kv.shape[4],
            dtype=KV_DTYPES[kv.dtype],
            scale=spec.scale,
        )
        args = _ForwardArgs(
            attention=attention,
            layers=ctypes.addressof(self._layers),
            embedding=self._embedding,
            head=self._head,
            final_norm=self._norm,
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            cos=self._cos,
            sin=self._sin,
            logit_rows=logit_rows.data_ptr(),
            logits=logits.data_ptr(),
            cancelled=None if self._flag is None else self._flag.address,
            kv_layer=layer,
            num_layers=len(self._layers),
            num_tokens=batch.num_tokens,
            hidden=self._hidden,
            intermediate=self._inner,
            vocab=self._vocab,
            num_logit_rows=len(rows),
            embedding_dtype=self._embedding_dtype,
            norm_epsilon=self._epsilon,
            choices=self._choices,
        )
        status = self._library.forward(args)
        if status == _CANCELLED:
            raise ForwardCancelledError
        if status != 0:
            raise RuntimeError(f"the native forward pass refused its arguments (status {status})")
        return logits
