"""Capturing graphs on an NVIDIA GPU, as torch documents it (CUDA semantics, CUDA Graphs)."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaGraph:
    """See `engine.decode_graphs.Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self.output = output
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphCapture:
    """See `engine.decode_graphs.GraphCapture`. All graphs take their memory from one pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], torch.Tensor]) -> CudaGraph:
        """Runs `work` twice: on a stream of its own, where kernels are compiled and libraries set up, then captured."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work()
        return CudaGraph(graph, output)
