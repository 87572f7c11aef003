"""Small programs and graphs of them, shared by the tests of this folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import unisono.kernels  # noqa: F401  (registers the ops)
from unisono.graphs import Buffers, BufferSchema, Field, GraphKey, PassShape, PendingOutputs, Program, Reason, Replay
from unisono.graphs.buckets import Buckets
from unisono.graphs.cuda import CudaGraph
from unisono.graphs.graph_set import GraphSet
from unisono.graphs.planner import Planner
from unisono.graphs.tape import Tape

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FULL, SEGMENTED, COMPILED = (
    ("full", "segmented", "compiled") if DEVICE.type == "cuda" else ("tape", "tape-segmented", "tape-compiled")
)
SCHEMA = BufferSchema(
    (
        Field("x", torch.int32, ("rows", 2), pad=-1),
        Field("scale", torch.float32, ("rows",)),
        Field("result", torch.float32, ("rows", 2), output=True),
    )
)


def batch(x: list[list[int]]) -> dict[str, Any]:
    return {"x": x, "scale": [1.0] * len(x)}


def program(run: Callable[[Buffers], Any], name: str = "p") -> Program:
    return Program(name, SCHEMA, run)


def graph_of(run: Callable[[Buffers], Any], rows: int = 4, first: dict[str, Any] | None = None, **how: bool) -> Any:
    """A graph of ``run``, captured on the batch ``first``: a CUDA graph where there is a GPU, else a tape."""
    buffers = Buffers(SCHEMA, PassShape(rows), DEVICE)
    if first is not None:
        buffers.load(first)
    key = GraphKey("p", PassShape(rows))
    if DEVICE.type == "cpu":
        return Tape(program(run), key, buffers, **how)
    return CudaGraph(program(run), key, buffers, torch.cuda.graph_pool_handle(), **how)


def run_graph(graph: Any, x: list[list[int]]) -> list[list[float]]:
    """Replay on a batch; its rows of the result."""
    graph.buffers.load(batch(x))
    graph.replay()
    return graph.buffers.fetch().wait()["result"][: len(x)].tolist()


def poison(graph: Tape) -> int:
    """Fill what the graph's pass makes with garbage, as another replay in its pool would; returns how many tensors."""
    made = graph.intermediates()
    for tensor in made:
        tensor.fill_(math.nan if tensor.is_floating_point() else 1 if tensor.dtype is torch.bool else -77)
    return len(made)


class LonePlanner(Planner):
    """A planner without an engine: it has a graph set of its own, whose programs are those of the plan."""

    def __init__(self, device: torch.device, **how: Any) -> None:
        super().__init__(GraphSet(device, {}), **how)

    def capture(self, plan: Sequence[Buckets], progress: Callable[[float], None] = lambda share: None) -> None:
        self.graph_set.programs |= {buckets.program.name: buckets.program for buckets in plan}
        super().capture(plan, progress)

    def run(self, key: GraphKey, batch: dict[str, Any], **how: bool) -> PendingOutputs:
        """Launch a pass as planned, as the runner does it."""
        outputs = self._send(self.launch(key, batch, **how))
        assert isinstance(outputs, PendingOutputs)
        return outputs


def double(b: Buffers) -> None:
    y = b.x.float() * b.scale[:, None]
    b.result.copy_(y + y.relu() * 0)


def shapes(*rows: int) -> tuple[PassShape, ...]:
    return tuple(PassShape(n) for n in rows)


def answer(planner: Planner, rows: int) -> int | Reason:
    """Rows of the graph that serves a pass of this size, or the reason why none does."""
    told = planner.plan(GraphKey("p", PassShape(rows)))
    return told.graph.key.shape.rows if isinstance(told, Replay) else told.reason
