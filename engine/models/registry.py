"""From a model directory to a decoder: which architecture it is, its spec, its weights, its fingerprint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import msgspec
import torch

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.fingerprint import check_unchanged, stamp_of, weights_fingerprint
from engine.checkpoints.progress import Report, silent
from engine.checkpoints.weight_files import read_weight_files
from engine.models import llama, mistral, qwen2, qwen3
from engine.models.config import ConfigReader, read_config
from engine.models.decoder import Decoder, take_decoder
from engine.models.quantized import open_scheme
from engine.models.spec import ModelSpec
from engine.models.weights import Weights
from engine.quantization.names import QuantizationName
from engine.quantization.scheme import SCHEME_VERSION, Scheme

logger = logging.getLogger(__name__)

_MODULES: tuple[ModuleType, ...] = (llama, mistral, qwen2, qwen3)
ARCHITECTURES: tuple[str, ...] = tuple(module.ARCHITECTURE for module in _MODULES)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`fingerprint`: hex; equal only for equal weights and settings, whatever the directory is called. It covers
    the quantisation, not the dtype the weights were loaded in."""

    decoder: Decoder
    spec: ModelSpec
    fingerprint: str


def read_spec(path: Path) -> ModelSpec:
    """The spec of a model directory, from its config files alone. Raises CheckpointError, for an architecture without a native
    decoder naming those there are."""
    config, generation = read_config(path)
    spec: ModelSpec = _module_for(config).read_spec(config, generation)
    return spec


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: QuantizationName = "none",
    cache_dir: Path | None = None,
    report: Report = silent,
) -> LoadedModel:
    """Reads a Hugging Face directory into a decoder.

    Weights are copied once, out of the mapped files; what is quantised is so one matrix at a time. `cache_dir`: where digests
    of weight files are remembered; None: they are read anew. Raises CheckpointError: a file is missing or cut off, a tensor is
    missing, unknown or of another shape, the architecture or a setting is not supported, or `quantization` is gguf and the
    directory has no GGUF file.
    """
    spec = read_spec(path)
    files = read_weight_files(path)
    scheme = open_scheme(quantization, path)
    hashed = [file.path for file in files] + ([] if scheme is None else list(scheme.files))
    stamps = [(file, stamp_of(file)) for file in hashed]
    fingerprint = weights_fingerprint(hashed, _settings(spec) + _scheme_settings(scheme), cache_dir, report=report)
    weights = Weights(path, files, dtype=dtype, device=torch.device(device), report=report)
    try:
        decoder = take_decoder(weights, spec, scheme)
        weights.check_nothing_left(spec.architecture)
        for file, stamp in stamps:  # what was hashed is what was loaded
            check_unchanged(file, stamp)
    finally:
        weights.close()
    if scheme is not None:
        logger.info("Quantised (%s): %s.", scheme.name, scheme.summary())
    return LoadedModel(decoder, spec, fingerprint)


def _module_for(config: ConfigReader) -> ModuleType:
    names = config.strings("architectures")
    for module in _MODULES:
        if (names and module.ARCHITECTURE in names) or (not names and config.values.get("model_type") == module.MODEL_TYPE):
            return module
    name = ", ".join(names) if names else config.values.get("model_type", "unknown")
    raise CheckpointError(
        f"{config.where}: there is no native decoder for the architecture {name}. Those there are: {', '.join(ARCHITECTURES)}."
    )


def _settings(spec: ModelSpec) -> bytes:
    """Everything of the spec that shapes keys and values, and nothing that does not (which tokens end a text)."""
    values = msgspec.to_builtins(spec)
    for field in ("eos_token_ids", "bos_token_id"):
        del values[field]
    return msgspec.json.encode(sorted(values.items()))


def _scheme_settings(scheme: Scheme | None) -> bytes:
    """Nothing without one: fingerprints of models that are not quantised stay what they were."""
    return b"" if scheme is None else f"\x00quantization={scheme.name}-v{SCHEME_VERSION}".encode()
