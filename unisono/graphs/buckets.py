"""What may be captured of a program, and which of it is worth a graph. Read by the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.graphs import NO_FEATURES, Features, Graph, Key, Program, Reason, Shape
from unisono.graphs.cost import PassCost, choose


@dataclass(frozen=True)
class Buckets:
    """The shapes of one program, with one width and one set of features, that may be captured.

    shapes: ascending in rows.
    mode: "full": only hard breaks end a segment; "segmented": optional breaks do too; "off": passes run eagerly.
    passes: expected number of passes, from which the shapes worth capturing are chosen; None: capture all shapes.
    edges: numbers of rows that fill a kernel's tile exactly; one row more costs a tile. Passes are measured there.
    flat: up to this number of rows the cost is a staircase with a step after each edge.
    cost: the cost of a pass; None: unknown, and a pass replays any graph that covers it. measured: measure the cost.
    always: replay even where a graph saves no time.
    on_demand: capture no graph at start; capture each size before the first pass that needs it. For programs whose
        passes do not overlap with others.
    later: capture no graph at start, but when the engine is idle.
    kept_ms: shapes that take from the first to the second number of milliseconds are captured then, whatever they save.
    when_idle: numbers of rows that are captured then too.
    common: numbers of rows that many passes have exactly: they are captured at start, whatever they save.
    unfit: why not even the smallest shape could be captured; None where it could be, or was not tried.
    spare: other graphs serve these passes, too, only slower; so these are captured last.
    share: the share of the memory budget that the program's graphs may take.
    width: of the shapes.
    like: the program and width whose passes cost the same, planned before; instead of measuring.
    """

    program: Program
    shapes: tuple[Shape, ...] = ()
    features: Features = NO_FEATURES
    mode: str = "full"
    passes: float | None = None
    edges: frozenset[int] = frozenset()
    flat: int = 0
    cost: PassCost | None = None
    measured: bool = False
    always: bool = False
    on_demand: bool = False
    later: bool = False
    kept_ms: tuple[float, float] = (0.0, 0.0)
    when_idle: frozenset[int] = frozenset()
    common: frozenset[int] = frozenset()
    unfit: Reason | None = None
    spare: bool = False
    share: float = 1.0
    width: int = 1
    like: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if self.shapes:
            object.__setattr__(self, "width", self.shapes[0].width)

    def key(self, shape: Shape) -> Key:
        return Key(self.program.name, shape, self.features)


def kept(buckets: Buckets) -> list[Shape]:
    """The shapes that an idle engine captures, whatever they save, the longest first."""
    (least, most), cost = buckets.kept_ms, buckets.cost
    if cost is None:
        return []
    return [s for s in reversed(buckets.shapes) if s.rows in buckets.when_idle or least <= cost.replay(s.rows) <= most]


def worthwhile(buckets: Buckets, graphs: Sequence[Graph] = ()) -> list[Shape]:
    """The shapes worth capturing in addition to ``graphs``."""
    if buckets.passes is None or buckets.cost is None:
        return list(buckets.shapes)
    there = {graph.key.shape.rows for graph in graphs if graph.key.features == buckets.features} | buckets.common
    chosen = choose([shape.rows for shape in buckets.shapes], buckets.cost, buckets.passes, there)
    return [shape for shape in buckets.shapes if shape.rows in chosen or shape.rows in buckets.common]
