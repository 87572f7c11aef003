"""Full CUDA graphs: a program captured whole, replayed by one cudaGraphLaunch."""

from __future__ import annotations

import time
from typing import Any

import torch

from unisono.program import Buffers, Key, Program


class FullGraph:
    """A captured pass on the GPU; see :class:`unisono.program.Graph`.

    ``pool`` is the memory pool that all graphs share: their intermediates overlap, so only buffers may
    be read after a replay. Raises torch.cuda.OutOfMemoryError when the capture does not fit.
    """

    kind = "full"

    def __init__(self, program: Program, key: Key, buffers: Buffers, pool: Any) -> None:
        started = time.perf_counter()
        self.key, self.buffers, self._program = key, buffers, program
        program.run(buffers)  # compiles kernels and creates handles, which a capture must not do
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            program.run(buffers)
        torch.cuda.synchronize()
        self.cost_bytes = max(0, free - torch.cuda.mem_get_info()[0])
        self.cost_seconds = time.perf_counter() - started

    def replay(self) -> None:
        if self._program.prepare is not None:
            self._program.prepare(self.buffers)
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()
