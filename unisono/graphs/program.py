"""A program, its captured graphs, and the planner's two answers: replay, or run eagerly for a reason."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from unisono.graphs.buffers import Buffers, BufferSchema
from unisono.graphs.features import Features, GraphKey


@dataclass(frozen=True)
class Program:
    """A pass as data: its name, the schema of its buffers and the function that runs it.

    run: works in place on the buffers, at fixed addresses, without host synchronisation.
    """

    name: str
    schema: BufferSchema
    run: Callable[[Buffers], None]

    def of(self, features: Features) -> Program:
        """This program with the fields of passes with these features."""
        return replace(self, schema=self.schema.of(features))


class Reason(enum.Enum):
    """Reasons why a pass ran without a graph. Each is counted, exported and shown by ``explain``.

    ``value`` is the reason, ``advice`` what the user can change.
    """

    advice: str

    def __new__(cls, why: str, advice: str) -> Reason:
        member = object.__new__(cls)
        member._value_, member.advice = why, advice
        return member

    DISABLED = "graphs are off", "drop --enforce-eager or --graphs off"
    ABOVE_BUCKETS = (
        "the batch is larger than the largest captured bucket",
        "an idle server captures it; raise --graph-memory, or lower --max-num-batched-tokens to the largest bucket",
    )
    UNPROFITABLE = (
        "the smallest graph that holds it would lose more to padding than it saves",
        "none needed; an idle server captures a closer one where that pays",
    )
    NO_MEMORY = (
        "capturing this bucket ran out of memory",
        "lower --gpu-memory-utilization or --max-num-batched-tokens",
    )
    OVER_BUDGET = "capturing this bucket would have passed the memory budget for graphs", "raise --graph-memory"
    NOT_CAPTURED = "no graph was captured for these features", "an idle server captures it"


class Graph(Protocol):
    """One captured pass: segments, and the breaks that run eagerly between them.

    kind: full, segmented, compiled; on a CPU tape, tape-segmented, tape-compiled.
    cost_bytes: memory of the graph without its buffers.
    replay_ms: time of one replay on padding.
    capture_seconds: time of the whole capture.
    """

    kind: str
    key: GraphKey
    buffers: Buffers
    cost_bytes: int
    replay_ms: float
    capture_seconds: float

    @property
    def breaks(self) -> int:
        """Eager calls in a replay."""

    def replay(self) -> None:
        """Run the captured pass on the current contents of the buffers."""

    def close(self) -> None:
        """Free the graph's memory."""


@dataclass(frozen=True)
class Replay:
    """The planner's answer: replay this graph."""

    graph: Graph


@dataclass(frozen=True)
class Eager:
    """The planner's answer: run without a graph, for this reason."""

    reason: Reason
