"""A whole forward pass in one call: the bfloat16 decoder of decoder.h, for machines with AMX."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.cpu.library import AttentionArgs, Library, Team
from engine.kernels.interface import AttentionSpec, StepBatch

_pointer, _int64, _int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's weights as a checkpoint has them, row-major: qkv [(heads + 2 kv heads) dim, hidden], out [hidden, heads dim],
    gate_up [2 inner, hidden] (gate first), down [hidden, inner]; norms [hidden] or, over heads, [dim]."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
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
    head: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    norm_epsilon: float


class _LayerWeights(ctypes.Structure):
    """Mirrors LayerWeights of decoder.h."""

    _fields_ = (
        *((name, _pointer) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _pointer) for name in ("qkv_bias", "input_norm", "post_norm", "q_norm", "k_norm")),
        ("window", _int64),
    )


class _ForwardArgs(ctypes.Structure):
    """Mirrors ForwardArgs of decoder.h."""

    _fields_ = (
        ("attention", AttentionArgs),
        *((name, _pointer) for name in ("layers", "embedding", "head", "final_norm", "token_ids", "slots", "cos", "sin")),
        *((name, _pointer) for name in ("logit_rows", "logits", "workspace")),
        ("kv_layer", _int64),
        *((name, _int32) for name in ("num_layers", "num_tokens", "hidden", "intermediate", "vocab", "num_logit_rows")),
        ("norm_epsilon", ctypes.c_float),
    )


def unfit(specs: Sequence[AttentionSpec], hidden: int, inner: int) -> str | None:
    """Why a model of this shape cannot run here, or None when it can: the tiles take 32 input dims at a time."""
    first = specs[0]
    if any((s.num_heads, s.num_kv_heads, s.head_dim, s.scale) != _shape(first) for s in specs):
        return "its layers differ in shape"
    if first.head_dim % 32:
        return f"head_dim {first.head_dim} is no multiple of 32"
    for name, size in (("hidden_size", hidden), ("intermediate_size", inner)):
        if size % 32:
            return f"{name} {size} is no multiple of 32"
    return None


def _shape(spec: AttentionSpec) -> tuple[int, int, int, float]:
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale


class NativeDecoder:
    """The weights, packed in the order in which the tiles read them; `run` computes a batch over paged KV.

    The residual stream is kept in float32; products take bfloat16 and sum in float32. A row's result does not depend on the
    other rows of its batch, but for how a long context is split over threads.
    """

    def __init__(self, library: Library, team: Team, specs: Sequence[AttentionSpec], tensors: DecoderTensors) -> None:
        """Raises ValueError for a model that `unfit` names, and where the machine has no AMX."""
        if not library.has_amx:
            raise ValueError("this machine has no AMX tiles for bfloat16")
        hidden, inner = tensors.embedding.shape[1], tensors.intermediate_size
        reason = unfit(specs, hidden, inner)
        if reason is not None:
            raise ValueError(reason)
        self._library = library
        self._team = team
        self._spec = specs[0]
        self._hidden, self._inner, self._vocab = hidden, inner, tensors.embedding.shape[0]
        self._epsilon = tensors.norm_epsilon
        self._cos, self._sin = tensors.cos.contiguous(), tensors.sin.contiguous()
        self._owned: list[torch.Tensor] = []  # what the pointers below point into
        self._embedding = self._own(tensors.embedding.to(torch.bfloat16))
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

    @property
    def library(self) -> Library:
        """What it was built with."""
        return self._library

    @property
    def team(self) -> Team:
        """The threads that it computes on."""
        return self._team

    def _own(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._owned.append(tensor)
        return tensor.data_ptr()

    def _float(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._own(tensor.float())

    def _pack(self, weight: torch.Tensor, *, paired: bool = False) -> int:
        weight = weight.to(torch.bfloat16).contiguous()
        rows, columns = weight.shape
        packed = torch.empty(self._library.packed_size(rows, columns) + 32, dtype=torch.bfloat16)
        packed = packed[-packed.data_ptr() % 64 // 2 :]  # tiles are read a cache line at a time
        self._library.pack(weight.data_ptr(), rows, columns, paired, packed.data_ptr())
        return self._own(packed)

    def run(self, batch: StepBatch, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Computes a batch, writing its KV. kv: bfloat16 [block][layer][k, v][kv head][token][dim].

        Returns the logits that follow the tokens in `rows` of the batch, float32 [len(rows), vocabulary]. Positions must lie
        within the tables of cosines and ids within the vocabulary; they are not checked.
        """
        spec, tokens = self._spec, batch.num_tokens
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        halves = tokens * (self._hidden + width + 2 * spec.num_heads * spec.head_dim + self._inner)
        workspace = torch.empty(tokens * self._hidden + halves // 2 + 64, dtype=torch.float32)
        logits = torch.empty((len(rows), self._vocab), dtype=torch.float32)
        logit_rows = torch.tensor(rows, dtype=torch.int64)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
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
            scale=spec.scale,
        )
        args = _ForwardArgs(
            attention=attention,
            layers=ctypes.addressof(self._layers),
            embedding=self._embedding,
            head=self._head,
            final_norm=self._norm,
            token_ids=batch.token_ids.data_ptr(),
            slots=batch.slots.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            logit_rows=logit_rows.data_ptr(),
            logits=logits.data_ptr(),
            workspace=workspace.data_ptr(),
            kv_layer=layer,
            num_layers=len(self._layers),
            num_tokens=tokens,
            hidden=self._hidden,
            intermediate=self._inner,
            vocab=self._vocab,
            num_logit_rows=len(rows),
            norm_epsilon=self._epsilon,
        )
        status = self._library.forward(args)
        if status != 0:
            raise RuntimeError(f"the native forward pass refused its arguments (status {status})")
        return logits
