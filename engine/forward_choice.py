"""Which forward pass this machine gives a model: the native one, the layers around the C++ attention kernel, or plain torch."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.forward import Forward, LayeredForward
from engine.kernels.cpu.decoder import NativeDecoder
from engine.kernels.cpu.kernel import CpuAttention
from engine.kernels.cpu.library import KernelBuildError
from engine.kernels.cpu.methods import MethodTable
from engine.kernels.cpu.sampling import CpuSampler
from engine.kernels.reference import ReferenceAttention
from engine.models.decoder import Decoder
from engine.models.native import native_decoder, why_not_native

logger = logging.getLogger(__name__)


def row_chooser(forward: Forward) -> CpuSampler | None:
    """What chooses tokens beside this forward pass, on the same threads; None where there are no C++ kernels."""
    kernel = forward.kernel if isinstance(forward, LayeredForward) else forward
    return CpuSampler(kernel.library, kernel.team) if isinstance(kernel, CpuAttention | NativeDecoder) else None


def choose_forward(config: EngineConfig, decoder: Decoder, kernel_dir: Path) -> Forward:
    """The fastest one there is. `kernel_dir` keeps what was built from one start to the next.

    One log line says what was chosen; where the C++ kernels cannot be had, it says why and what is lost. With the native pass
    torch is left one thread: its threads would only stand in the way of the team's.
    """
    if config.kernels == "reference" or decoder.device.type != "cpu":
        return LayeredForward(decoder, ReferenceAttention())
    threads = config.threads or torch.get_num_threads()
    try:
        kernel = CpuAttention.build(decoder.spec.head_dim, threads, kernel_dir)
    except KernelBuildError as error:
        logger.warning("The forward pass runs in plain torch, several times as slow as in C++: %s.", str(error).rstrip("."))
        return LayeredForward(decoder, ReferenceAttention())
    reason = why_not_native(decoder)
    if reason is not None:
        logger.info("Attention runs in C++ on %d threads, the rest in torch: %s.", threads, reason)
        return LayeredForward(decoder, kernel)
    table = MethodTable(kernel.library, kernel.team)
    half = table.half_format() if decoder.dtype == torch.bfloat16 else None
    forward = native_decoder(decoder, kernel.library, kernel.team, table, half, give_away=True)
    logger.info(
        "The forward pass runs in C++ on %d threads: %s.", threads, "; ".join(table.describe(f) for f in forward.formats)
    )
    torch.set_num_threads(1)
    return forward
