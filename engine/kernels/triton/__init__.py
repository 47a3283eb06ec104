"""Triton kernels for NVIDIA GPUs. Nothing here is imported unless a model runs on one (engine/forward_choice.py)."""
