"""Capture candidates of a program, and the choice of those worth a graph. Read by the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.graphs import NO_FEATURES, Features, Graph, GraphKey, PassShape, Program, Reason
from unisono.graphs.cost import PassCost, choose


@dataclass(frozen=True)
class Buckets:
    """The shapes of one program, with one width and one set of features, that may be captured.

    shapes: ascending in rows.
    mode: "full": only hard breaks end a segment; "segmented": optional breaks do too; "off": passes run eagerly.
    passes: expected number of passes, used to choose the shapes worth capturing; None: capture all shapes.
    edges: row counts that fill a kernel's tile exactly; one more row costs a tile. Passes are measured there.
    flat: up to this number of rows the cost is a staircase with a step after each edge.
    cost: the cost of a pass; None: unknown, and a pass replays any graph that covers it.
    measured: measure the cost.
    always: replay even if a graph saves no time.
    on_demand: capture nothing at start; capture each size before the first pass that needs it. For programs whose
        passes do not overlap with others.
    deferred: capture nothing at start, but when the engine is idle.
    kept_ms: also capture shapes whose duration is in this range (milliseconds) when idle, whatever they save.
    when_idle: also capture these row counts when idle.
    common: row counts that many passes have exactly; captured at start, whatever they save.
    unfit: reason why even the smallest shape could not be captured; None if it could, or was not tried.
    spare: other graphs also serve these passes, only slower, so these are captured last.
    share: share of the memory budget available to the program's graphs.
    width: width of the shapes.
    cost_like: program and width, planned before, whose passes cost the same; used instead of measuring.
    """

    program: Program
    shapes: tuple[PassShape, ...] = ()
    features: Features = NO_FEATURES
    mode: str = "full"
    passes: float | None = None
    edges: frozenset[int] = frozenset()
    flat: int = 0
    cost: PassCost | None = None
    measured: bool = False
    always: bool = False
    on_demand: bool = False
    deferred: bool = False
    kept_ms: tuple[float, float] = (0.0, 0.0)
    when_idle: frozenset[int] = frozenset()
    common: frozenset[int] = frozenset()
    unfit: Reason | None = None
    spare: bool = False
    share: float = 1.0
    width: int = 1
    cost_like: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if self.shapes:
            object.__setattr__(self, "width", self.shapes[0].width)

    @property
    def label(self) -> str:
        """Key of a measured pass cost within one engine: program, features, shapes and graph mode."""
        shapes = [(shape.rows, shape.width) for shape in self.shapes]
        how = self.mode, sorted(self.edges), self.flat, self.always
        return f"{self.program.name} {self.features.label} {shapes} {how}"

    def key(self, shape: PassShape) -> GraphKey:
        return GraphKey(self.program.name, shape, self.features)


def idle_shapes(buckets: Buckets) -> list[PassShape]:
    """Shapes that an idle engine captures whatever they save, largest first."""
    (least, most), cost = buckets.kept_ms, buckets.cost
    if cost is None:
        return []
    return [s for s in reversed(buckets.shapes) if s.rows in buckets.when_idle or least <= cost.replay(s.rows) <= most]


def worthwhile(buckets: Buckets, graphs: Sequence[Graph] = ()) -> list[PassShape]:
    """Shapes worth capturing in addition to ``graphs``."""
    if buckets.passes is None or buckets.cost is None:
        return list(buckets.shapes)
    there = {graph.key.shape.rows for graph in graphs if graph.key.features == buckets.features} | buckets.common
    chosen = choose([shape.rows for shape in buckets.shapes], buckets.cost, buckets.passes, there)
    return [shape for shape in buckets.shapes if shape.rows in chosen or shape.rows in buckets.common]
