"""A decoder: embedding, layers, final norm, head. What an architecture adds is in its own module."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.interface import LayerAttention
from engine.models.layers import DecoderLayer, Linear, take_decoder_layer, take_linear, take_norm, take_quantized
from engine.models.operations import Operations, RMSNorm, TorchOperations
from engine.models.rope import rope_table
from engine.models.spec import ModelSpec
from engine.models.weights import Weights
from engine.quantization.scheme import Scheme

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Decoder:
    """A model ready to run. Not bound to a batch: two calls may come from two threads."""

    def __init__(
        self, spec: ModelSpec, embedding: torch.Tensor, layers: Sequence[DecoderLayer], norm: RMSNorm, head: Linear
    ) -> None:
        self.spec = spec
        self.dtype: torch.dtype = embedding.dtype
        self.device: torch.device = embedding.device
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self._plain = TorchOperations()
        self._cos, self._sin = rope_table(spec.rope, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: LayerAttention,
        operations: Operations | None = None,
    ) -> torch.Tensor:
        """token_ids, positions: int64 [T] -> hidden states after the final norm, [T, hidden size], in the model's dtype.

        operations: what computes between the products; None: plain torch, in which every layer calls
        `attention(layer, q, k, v)` once, in order. Positions must lie below `spec.max_context` and ids below
        the vocabulary's size (IndexError).
        """
        operations = operations or self._plain
        x = self.embedding[token_ids]
        rotation = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        delta = None
        for layer in self.layers:
            delta = layer(x, delta, rotation, attention, operations)
        return operations.add_norm(x, delta, self.norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, [R, hidden size] -> float32 [R, vocabulary]."""
        return self.head(hidden).float()


def take_decoder(weights: Weights, spec: ModelSpec, scheme: Scheme | None = None) -> Decoder:
    """Builds the decoder that `spec` describes. Raises CheckpointError when the weights do not fit it.

    scheme: quantises the matrices of the layers and the head, one at a time as they are read; None leaves them. Embedding,
    norms and biases stay as they are.
    """
    embedding = weights.take(EMBEDDING, (spec.vocab_size, spec.hidden_size))
    layers = [take_decoder_layer(weights, spec, index, scheme) for index in range(spec.num_layers)]
    norm = take_norm(weights, "model.norm", spec.hidden_size, spec.rms_norm_eps)
    return Decoder(spec, embedding, layers, norm, _take_head(weights, spec, embedding, scheme))


def _take_head(weights: Weights, spec: ModelSpec, embedding: torch.Tensor, scheme: Scheme | None) -> Linear:
    """The head's own matrix, or the embedding when they are tied.

    A checkpoint that says tied and still brings a head of its own, with other values, is believed in what it brings, as
    transformers does.
    """
    if spec.tie_word_embeddings:
        if HEAD not in weights:
            return _tied_head(weights, embedding, scheme)
        if weights.same(HEAD, EMBEDDING):
            weights.ignore(HEAD)
            return _tied_head(weights, embedding, scheme)
    return take_linear(weights, [(HEAD.removesuffix(".weight"), spec.vocab_size)], spec.hidden_size, scheme=scheme)


def _tied_head(weights: Weights, embedding: torch.Tensor, scheme: Scheme | None) -> Linear:
    rows, columns = embedding.shape
    matrix = None if scheme is None else take_quantized(weights, [(EMBEDDING, rows)], columns, scheme, taken=embedding)
    return Linear(embedding) if matrix is None else Linear.of_quantized(matrix, embedding.dtype)
