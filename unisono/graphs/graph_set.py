"""Graph set of a worker: captured graphs by key, and the commands that capture, replay and free them.

A graph set decides nothing and compares no times. The planner of rank 0 decides which graphs exist and which passes
replay one, and sends its decisions as commands, so every rank that executes the same commands holds the same graphs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from unisono.graphs import Buffers, Features, Graph, GraphKey, PendingOutputs, Program
from unisono.graphs.cuda import CudaGraph
from unisono.graphs.tape import Tape

KEPT_EAGER_BUFFERS, KEPT_EAGER_BYTES = 64, 4 << 20
"""Buffers of eager passes kept for the next pass of the same key: maximum number, and maximum bytes of each."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Run the pass ``key`` on ``batch``: replay the captured graph ``graph``, or run eagerly if it is None.

    batch: an array or a list of numbers for each input field of the program.
    timed: on a GPU, record when the device starts and finishes the pass.
    """

    key: GraphKey
    graph: GraphKey | None
    batch: Mapping[str, Any]
    timed: bool = False


class Capture(msgspec.Struct, frozen=True, tag=True):
    """Capture a graph of the pass ``key``. splits: optional eager breaks end segments too."""

    key: GraphKey
    splits: bool = False


class Release(msgspec.Struct, frozen=True, tag=True):
    """Free the graph of this key, if there is one."""

    key: GraphKey


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Run the pass ``key`` eagerly on padding and record its duration in ``GraphSet.eager_ms``."""

    key: GraphKey


GraphCommand = Launch | Capture | Release | Measure


class GraphSet:
    """The graphs of one worker, and the buffers of its eager passes.

    programs: all programs by name.
    compile: apply torch.compile to pieces of each captured pass. ``eager_ms``: for each measured key, milliseconds
        until the host has launched the pass, and until it is done.
    """

    def __init__(self, device: torch.device, programs: Mapping[str, Program], compile: bool = False) -> None:
        self.device, self.programs, self.compile = device, dict(programs), compile
        self.eager_ms: dict[GraphKey, tuple[float, float]] = {}
        self._graphs: dict[GraphKey, Graph] = {}
        self._eager_buffers: dict[GraphKey, Buffers] = {}
        self._recorded: set[tuple[str, int, Features]] = set()  # program, width and features of every earlier tape
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def pooled(self) -> bool:
        """True if all graphs share one memory pool, as on a GPU."""
        return self._pool is not None

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Graph]:
        return iter(self._graphs.values())

    def get(self, key: GraphKey) -> Graph | None:
        """The graph captured for exactly this key."""
        return self._graphs.get(key)

    def execute(self, command: GraphCommand) -> PendingOutputs | None:
        """Execute a command; return the outputs of a launched pass.

        Raises torch.OutOfMemoryError, with the set unchanged, if a capture does not fit.
        """
        if isinstance(command, Launch):
            return self._launch(command)
        if isinstance(command, Capture):
            self._graphs[command.key] = self._capture(command.key, command.splits)
        elif isinstance(command, Release):
            self._release(command.key)
        else:
            self.eager_ms[command.key] = self._measured(command.key)
        return None

    def _launch(self, command: Launch) -> PendingOutputs:
        if not command.timed or self.device.type != "cuda":
            return self._run(command)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        outputs = self._run(command)
        end.record()
        outputs.span = begin, end
        return outputs

    def _run(self, command: Launch) -> PendingOutputs:
        key = command.key
        if command.graph is not None:
            graph = self._graphs[command.graph]
            graph.buffers.load(command.batch, key.features)
            graph.replay()
            return graph.buffers.fetch()
        program = self.programs[key.program]
        buffers = self._eager(program, key)
        buffers.load(command.batch)
        program.run(buffers)
        return buffers.fetch()

    def _eager(self, program: Program, key: GraphKey) -> Buffers:
        """Buffers of exactly this shape: an eager pass has no padding rows."""
        buffers = self._eager_buffers.get(key)
        if buffers is None:
            buffers = self._buffers(program, key)
            if buffers.nbytes <= KEPT_EAGER_BYTES:
                if len(self._eager_buffers) >= KEPT_EAGER_BUFFERS:  # prompts come in every length
                    self._eager_buffers.pop(next(iter(self._eager_buffers)))
                self._eager_buffers[key] = buffers
        return buffers

    def _buffers(self, program: Program, key: GraphKey) -> Buffers:
        return Buffers(program.schema.of(key.features), key.shape, self.device)

    def _capture(self, key: GraphKey, splits: bool) -> Graph:
        program = self.programs[key.program]
        buffers = self._buffers(program, key)
        if self._pool is None:
            like = key.program, key.shape.width, key.features
            tape = Tape(program, key, buffers, splits, self.compile, warm=like in self._recorded)
            self._recorded.add(like)
            return tape
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()  # torch frees a pool with its last graph, for good
        return CudaGraph(program, key, buffers, self._pool, splits, self.compile)

    def _release(self, key: GraphKey) -> None:
        graph = self._graphs.pop(key, None)
        if graph is not None:
            graph.close()
        del graph
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measured(self, key: GraphKey) -> tuple[float, float]:
        program = self.programs[key.program]
        buffers = self._buffers(program, key)
        times = []
        for _ in range(2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            program.run(buffers)
            launched = time.perf_counter()
            torch.cuda.synchronize()
            times.append((1e3 * (launched - started), 1e3 * (time.perf_counter() - started)))
        del buffers
        torch.cuda.empty_cache()
        return min(t[0] for t in times), min(t[1] for t in times)

    def close(self) -> None:
        """Free every graph, before the process group and the memory they were captured on."""
        for graph in self:
            graph.close()
        for held in (self._graphs, self._eager_buffers, self.eager_ms, self.programs):
            held.clear()  # the programs hold the model and the cache
