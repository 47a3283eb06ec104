"""Which forward pass this machine gives a model: on a CPU the native one, the layers around the C++ attention kernel, or plain
torch; on an NVIDIA GPU the layers around the Triton kernels. And what else goes with it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.config import ConfigError, EngineConfig
from engine.cuda_graphs import CudaGraphCapture
from engine.decode_graphs import GraphCapture
from engine.forward import Forward, LayeredForward
from engine.kernels.cpu.decoder import NativeDecoder
from engine.kernels.cpu.kernel import CpuAttention
from engine.kernels.cpu.library import KernelBuildError
from engine.kernels.cpu.methods import MethodTable
from engine.kernels.cpu.sampling import CpuSampler
from engine.kernels.reference import ReferenceAttention
from engine.models.decoder import Decoder
from engine.models.native import native_decoder, why_not_native
from engine.sampling.sampler import RowChooser

logger = logging.getLogger(__name__)

TRITON = "triton"
"""The `name` of the attention kernel for GPUs. Its module is imported on them only."""


def row_chooser(forward: Forward) -> RowChooser | None:
    """What chooses tokens beside this forward pass: C++ on the same threads, or Triton; None where it is neither."""
    kernel = forward.kernel if isinstance(forward, LayeredForward) else forward
    if isinstance(kernel, CpuAttention | NativeDecoder):
        return CpuSampler(kernel.library, kernel.team)
    if _is_triton(forward):
        from engine.kernels.triton.sampling import TritonSampler

        return TritonSampler()
    return None


def graph_capture(forward: Forward) -> GraphCapture | None:
    """What captures decode steps of this forward pass; None where they cannot be: the reference kernel waits for the device."""
    return CudaGraphCapture() if _is_triton(forward) else None


def _is_triton(forward: Forward) -> bool:
    return isinstance(forward, LayeredForward) and forward.kernel.name == TRITON


def _on_gpu(decoder: Decoder) -> Forward:
    """The layers around the Triton kernels, or around the reference kernel where one log line says why and what is lost."""
    if decoder.device.index not in (None, 0):
        raise ConfigError(
            f"device is {decoder.device}; the kernels run on a process' first GPU: give --device cuda and choose the GPU with "
            f"CUDA_VISIBLE_DEVICES={decoder.device.index}."
        )
    reason = None
    if torch.version.hip is not None:
        reason = "the Triton kernels are for NVIDIA GPUs"
    elif torch.cuda.get_device_capability(decoder.device) < (8, 0):
        reason = "the Triton kernels need compute capability 8.0 or above"
    else:
        try:
            from engine.kernels.triton.attention import TritonAttention
            from engine.kernels.triton.operations import TritonOperations
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "triton":
                raise
            reason = "Triton is not installed; install it with `pip install 'turnkeep[gpu]'`"
    if reason is not None:
        logger.warning(
            "The forward pass runs in plain torch on %s, without fused kernels and captured graphs: %s.", decoder.device, reason
        )
        return LayeredForward(decoder, ReferenceAttention())
    logger.info("Attention, norms, rotation and sampling run in Triton on %s, products in torch.", decoder.device)
    return LayeredForward(decoder, TritonAttention(), TritonOperations())


def choose_forward(config: EngineConfig, decoder: Decoder, kernel_dir: Path) -> Forward:
    """The fastest one there is. `kernel_dir` keeps what was built from one start to the next.

    One log line says what was chosen; where the C++ kernels cannot be had, it says why and what is lost. With the native pass
    torch is left one thread: its threads would only stand in the way of the team's. Raises ConfigError for a GPU that is not
    the process' first.
    """
    if config.kernels == "reference" or decoder.device.type not in ("cpu", "cuda"):
        return LayeredForward(decoder, ReferenceAttention())
    if decoder.device.type == "cuda":
        return _on_gpu(decoder)
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
