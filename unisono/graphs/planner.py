"""The planner: which keys are captured, and whether a pass replays or runs eagerly, and why.

Owns every graph and every count. The engine asks :meth:`Planner.launch` for each pass; nobody else
decides whether a graph fits.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.graphs.cost import PassCost, choose
from unisono.graphs.cuda import CudaGraph
from unisono.graphs.tape import Tape
from unisono.program import (
    NO_FEATURES,
    Buffers,
    Eager,
    Features,
    Graph,
    Key,
    Logits,
    PendingOutputs,
    Program,
    Reason,
    Replay,
    Shape,
)

logger = logging.getLogger(__name__)

KEPT_EAGER_BUFFERS, KEPT_EAGER_BYTES = 64, 4 << 20
"""Buffers of eager passes that are kept for the next pass of the same key, and what each may take."""

KEPT_ANSWERS = 4096
"""Keys whose graph is remembered."""


@dataclass(frozen=True)
class Buckets:
    """The shapes that may be captured of one program in one width, ascending in rows.

    mode: full captures everything but hard breaks, segmented takes optional breaks too, off runs eagerly.
    passes: how many passes to expect, by which the shapes worth capturing are chosen; None captures all.
    edges: rows where a kernel's tile is just full, so that one row more costs a tile: passes are measured there.
    flat: up to so many rows a pass costs what one up to the next edge costs.
    cost: what a pass takes; None: nothing is known, and every pass that fits a graph replays it. measured: find it out.
    always: replay even where a graph would save nothing.
    on_demand: capture nothing at start, but a size before the first pass that wants it: where passes do not overlap.
    unfit: why not even the smallest shape could be captured, and so none is; None where it could, or was not tried.
    share: of the memory budget that the program's graphs may take.
    width: the shapes'.
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
    unfit: Reason | None = None
    share: float = 1.0
    width: int = 1

    def __post_init__(self) -> None:
        if self.shapes:
            object.__setattr__(self, "width", self.shapes[0].width)

    def key(self, shape: Shape) -> Key:
        return Key(self.program.name, shape, self.features)


class Planner:
    """Captures graphs and chooses one for each pass.

    ``launch`` is the only door: it loads the batch, replays or runs eagerly, counts which, and returns
    the pending outputs.

    enabled: False runs everything eagerly. compile: pieces of each pass go through torch.compile. budget: bytes that
    graphs may take, None for no limit. ``idle_captures`` counts graphs captured after the start.
    """

    def __init__(
        self, device: torch.device, enabled: bool = True, compile: bool = False, budget: int | None = None
    ) -> None:
        self.device, self.enabled, self.compile, self.budget = device, enabled, compile, budget
        self.passes: Counter[tuple[str, str, str]] = Counter()  # (program, kind, reason) -> passes
        # Rows of replayed graphs by program (tokens of an extend pass): with a request in them, and without.
        self.filled_rows: Counter[str] = Counter()
        self.padded_rows: Counter[str] = Counter()
        self.idle_captures = 0
        self.capture_seconds = 0.0
        self._kept_bytes = 0
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # By name and width: those of fewest needs first. Of needs that appear at run time: variants of these.
        self._programs: dict[tuple[str, int], list[Buckets]] = {}
        self._variants: dict[tuple[str, int], list[Buckets]] = {}
        self._graphs: dict[tuple[str, int], list[Graph]] = {}
        self._dropped: dict[Key, Reason] = {}
        self._answers: dict[Key, Replay | Eager] = {}  # of ``plan``, until a graph comes or goes
        self._missing: Counter[Key] = Counter()  # keys that passes wanted -> milliseconds they would have saved
        self._eager_buffers: dict[Key, Buffers] = {}

    # ---- capture ------------------------------------------------------------------------------

    def capture(self, plan: Sequence[Buckets], progress: Callable[[float], None] = lambda share: None) -> None:
        """Capture what is worth it, largest first, into one pool; ``progress`` is told the share done.

        A shape that does not fit is dropped: passes of its size run eagerly and count NO_MEMORY or OVER_BUDGET.
        """
        started = time.perf_counter()
        self._answers.clear()
        self._programs = {(buckets.program.name, buckets.width): [] for buckets in plan}
        self._variants = {name: [] for name in self._programs}
        for buckets in plan:
            variants = self._programs[buckets.program.name, buckets.width]
            if self.enabled and buckets.measured and self._captures(buckets):
                # More needs leave a pass's cost as it is, near enough.
                like = variants[0] if variants else self._measure(buckets)
                buckets = dataclasses.replace(buckets, cost=like.cost, shapes=like.shapes, unfit=like.unfit)
            if buckets.on_demand:
                buckets = dataclasses.replace(buckets, shapes=tuple(_worthwhile(buckets)))
            variants.append(buckets)
        if self.enabled:
            every = [b for variants in self._programs.values() for b in variants if self._captures(b)]
            wanted = [(b, s) for b in every if not b.on_demand for s in _worthwhile(b, self._of(b))]
            wanted.sort(key=lambda w: w[1].rows * w[1].width, reverse=True)
            for done, (buckets, shape) in enumerate(wanted, 1):
                self._add(buckets, buckets.key(shape))
                progress(done / len(wanted))
        self.capture_seconds += time.perf_counter() - started

    def capture_missing(self) -> int:
        """Capture the key whose lack has cost most, if having it would pay. For an idle engine: it takes a moment.

        Returns how many keys were captured: 0 or 1.
        """
        started = time.perf_counter()
        for key, saved in self._missing.most_common():
            buckets = self._buckets(key)
            if buckets.cost is not None and saved < buckets.cost.capture(key.shape.rows):
                continue
            del self._missing[key]
            if self._add(buckets, key) is not None:
                self.idle_captures += 1
                self.capture_seconds += time.perf_counter() - started
                return 1
        return 0

    @property
    def graph_bytes(self) -> int:
        """Bytes that all graphs take, and those that their pool keeps of graphs that were tried and closed."""
        return self._kept_bytes + sum(graph.cost_bytes for graph in self.graphs())

    def graphs(self) -> Iterator[Graph]:
        """Every captured graph."""
        for graphs in self._graphs.values():
            yield from graphs

    def _captures(self, buckets: Buckets) -> bool:
        return buckets.mode != "off" and bool(buckets.shapes)

    def _measure(self, buckets: Buckets) -> Buckets:
        """Find out what a pass costs: the smallest shape and those at edges as graphs, and the largest eagerly.

        Where the host's launches hide what the device takes for the largest, that is tried as a graph too. A graph that
        takes longer than the host to launch its pass is closed again: there eager passes lose nothing.
        """
        small, large = buckets.shapes[0], buckets.shapes[-1]
        launches, device = self._timed(buckets, large)
        host = math.inf if buckets.always else max(launches, self._timed(buckets, small)[0])
        points = {}
        for shape in reversed(buckets.shapes):  # large ones first: the small ones reuse their memory
            wanted = shape.rows in buckets.edges or shape is small
            if wanted or (shape is large and device < 2 * launches):
                graph = self._add(buckets, buckets.key(shape), tried=not wanted)
                if graph is not None:
                    points[shape.rows] = graph.replay_ms
                    if graph.replay_ms > host:
                        self._close(graph)
        if graph is None:
            return dataclasses.replace(buckets, shapes=(), unfit=self._dropped[buckets.key(small)])
        points.setdefault(large.rows, device)
        known = {"capture_ms": 1e3 * graph.capture_seconds, "graph_bytes": graph.cost_bytes}
        return dataclasses.replace(buckets, cost=PassCost.measured(points, buckets.flat, eager_ms=host, **known))

    def _of(self, buckets: Buckets) -> list[Graph]:
        """The graphs of this program and width."""
        return self._graphs.get((buckets.program.name, buckets.width), [])

    def _close(self, graph: Graph) -> None:
        """Give a graph back. Of its memory others may have what they capture; the pool keeps it as long as it lives."""
        self._graphs[graph.key.program, graph.key.shape.width].remove(graph)
        graph.close()
        if self._pool is not None:
            self._kept_bytes = 0 if next(self.graphs(), None) is None else self._kept_bytes + graph.cost_bytes

    def _timed(self, buckets: Buckets, shape: Shape) -> tuple[float, float]:
        """Milliseconds of an eager pass on padding: until the host has launched it, and until it is done."""
        buffers = Buffers(buckets.program.schema.of(buckets.features), shape, self.device)
        times = []
        for _ in range(2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            buckets.program.run(buffers)
            launched = time.perf_counter()
            torch.cuda.synchronize()
            times.append((1e3 * (launched - started), 1e3 * (time.perf_counter() - started)))
        del buffers
        torch.cuda.empty_cache()
        return min(t[0] for t in times), min(t[1] for t in times)

    def _add(self, buckets: Buckets, key: Key, tried: bool = False) -> Graph | None:
        """Capture a key unless it is there; None, and the reason noted, where memory does not allow it.

        tried: it is to be measured, and nothing is lost without it: no reason is noted.
        """
        graphs = self._graphs.setdefault((key.program, key.shape.width), [])
        if (there := next((g for g in graphs if g.key == key), None)) is not None:
            return there
        try:
            graph = self._capture(buckets, key)
        except torch.OutOfMemoryError:
            if not tried:
                self._drop(key, Reason.NO_MEMORY)
            return None
        if not self._affordable(buckets, key, graph.cost_bytes):
            graph.close()
            del graph
            if not tried:
                self._drop(key, Reason.OVER_BUDGET)
            return None
        self._answers.clear()
        graphs.append(graph)
        graphs.sort(key=lambda g: g.key.shape.rows)
        return graph

    def _affordable(self, buckets: Buckets, key: Key, cost: int) -> bool:
        """Whether another ``cost`` bytes stay within the budget, and within the program's own share of it."""
        if self.budget is None:
            return True
        own = sum(graph.cost_bytes for graph in self.graphs() if graph.key.program == key.program)
        return self.graph_bytes + cost <= self.budget and own + cost <= buckets.share * self.budget

    def _drop(self, key: Key, reason: Reason) -> None:
        self._dropped[key] = reason
        self._answers.clear()
        if self._pool is not None:
            torch.cuda.empty_cache()
        shape = f"{key.shape.rows} rows" + (f" × {key.shape.width}" if key.shape.width > 1 else "")
        level = logging.WARNING if reason is Reason.NO_MEMORY else logging.INFO  # a budget is kept on purpose
        logger.log(level, "No graph of %s for %s: %s. Advice: %s.", shape, key.program, reason.value, reason.advice)

    def _capture(self, buckets: Buckets, key: Key) -> Graph:
        buffers = Buffers(buckets.program.schema.of(key.features), key.shape, self.device)
        splits = buckets.mode == "segmented"
        if self._pool is None:
            return Tape(buckets.program, key, buffers, splits, self.compile)
        if next(self.graphs(), None) is None:
            self._pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph, and can't begin again
        return CudaGraph(buckets.program, key, buffers, self._pool, splits, self.compile)

    # ---- passes -------------------------------------------------------------------------------

    def pass_ms(self, key: Key) -> float | None:
        """Milliseconds of a pass on padding, as measured when its graph was captured; None where none serves it."""
        answer = self.plan(key)
        return answer.graph.replay_ms if isinstance(answer, Replay) else None

    def expected_ms(self, key: Key) -> float:
        """:meth:`pass_ms`, or what is known of an eager pass; 0 where nothing is."""
        cost = self._buckets(key).cost
        return self.pass_ms(key) or (cost.replay(key.shape.rows) if cost is not None else 0.0)

    def _buckets(self, key: Key) -> Buckets:
        """What may be captured for passes with this key's needs: with just these, or what is planned with more.

        Where nothing is, they are what was planned with most of these needs, with the rest of them added.
        """
        planned, variants = (of[key.program, key.shape.width] for of in (self._programs, self._variants))
        same = (b for b in (*planned, *variants) if b.features == key.features)
        more = (b for b in planned if b.features.covers(key.features))
        if (found := next(itertools.chain(same, more), None)) is None:
            most = dataclasses.replace(key.features, logits=Logits.ALL)  # graphs with all of them serve any
            *_, base = (planned[0], *(b for b in planned if most.covers(b.features)))
            found = dataclasses.replace(base, features=key.features)
            variants.append(found)
        return found

    def plan(self, key: Key) -> Replay | Eager:
        """Replay the smallest graph with this key's needs, else with more, that covers it; or say why none does."""
        answer = self._answers.get(key)
        if answer is None:
            if len(self._answers) >= KEPT_ANSWERS:  # prompts come in every length
                self._answers.clear()
            answer = self._answers[key] = self._plan(key)
        return answer

    def _plan(self, key: Key) -> Replay | Eager:
        buckets = self._buckets(key)
        if not self.enabled or buckets.mode == "off":
            return Eager(Reason.DISABLED)
        rows, cost = key.shape.rows, buckets.cost
        graphs = self._graphs.get((key.program, key.shape.width), [])
        large = [graph for graph in graphs if graph.key.shape.rows >= rows]  # ascending, as all graphs are
        for graph in (*(g for g in large if g.key.features == key.features), *large):
            if graph.key.covers(key):
                if cost is None or cost.replay(graph.key.shape.rows) <= cost.eager(rows):
                    return Replay(graph)
                return Eager(Reason.UNPROFITABLE)
        if buckets.unfit is not None:
            return Eager(buckets.unfit)
        for dropped, reason in self._dropped.items():
            if dropped.features == buckets.features and dropped.covers(key):
                return Eager(reason)
        if cost is not None and cost.eager(rows) <= cost.replay(rows):
            return Eager(Reason.UNPROFITABLE)
        able = [graph for graph in graphs if graph.key.features.covers(key.features)]
        if able and all(graph.key.shape.rows < rows for graph in able):
            return Eager(Reason.ABOVE_BUCKETS)
        return Eager(Reason.NOT_CAPTURED)

    def launch(self, key: Key, batch: Mapping[str, object]) -> PendingOutputs:
        """Load the batch, run the pass as planned, count it, and start fetching its outputs."""
        buckets = self._buckets(key)
        if buckets.on_demand:
            self._capture_now(buckets, key.shape.rows)
        answer = self.plan(key)
        if isinstance(answer, Replay):
            graph = answer.graph
            graph.buffers.load(batch, key.features)
            graph.replay()
            self.passes[key.program, graph.kind, ""] += 1
            self.padded_rows[key.program] += graph.key.shape.rows - key.shape.rows
            self.filled_rows[key.program] += key.shape.rows
            return graph.buffers.fetch()
        program = buckets.program
        buffers = self._eager(program, key)
        buffers.load(batch)
        if program.prepare is not None:
            program.prepare(buffers)
        program.run(buffers)
        self.passes[key.program, "eager", answer.reason.name] += 1
        self._note_missing(key, answer.reason)
        return buffers.fetch()

    def _capture_now(self, buckets: Buckets, rows: int) -> None:
        """Of a program that is captured on demand, have the size that serves so many rows best."""
        shape = next((s for s in buckets.shapes if s.rows >= rows), None)
        if shape is None or not self.enabled or not self._captures(buckets):
            return
        key = buckets.key(shape)
        if key in self._dropped or any(g.key == key for g in self._graphs.get((key.program, shape.width), ())):
            return
        started = time.perf_counter()
        self._add(buckets, key)
        self.capture_seconds += time.perf_counter() - started

    def _note_missing(self, key: Key, reason: Reason) -> None:
        """Remember which capture would have served this pass better."""
        if reason not in (Reason.ABOVE_BUCKETS, Reason.NOT_CAPTURED, Reason.UNPROFITABLE):
            return
        buckets = self._buckets(key)
        fits = (s for s in buckets.shapes if s.width == key.shape.width and s.rows >= key.shape.rows)
        if (shape := next(fits, None)) is None:
            return
        saved, closest = math.inf, buckets.key(shape)
        if buckets.cost is not None:
            saved = buckets.cost.eager(key.shape.rows) - buckets.cost.replay(shape.rows)
        if saved > 0 and closest not in self._dropped:
            self._missing[closest] += saved  # type: ignore[assignment]

    def _eager(self, program: Program, key: Key) -> Buffers:
        """Buffers of exactly this shape: an eager pass pays for no padding."""
        buffers = self._eager_buffers.get(key)
        if buffers is None:
            buffers = Buffers(program.schema.of(key.features), key.shape, self.device)
            if buffers.nbytes <= KEPT_EAGER_BYTES:
                if len(self._eager_buffers) >= KEPT_EAGER_BUFFERS:  # prompts come in every length
                    self._eager_buffers.pop(next(iter(self._eager_buffers)))
                self._eager_buffers[key] = buffers
        return buffers

    def forget(self) -> None:
        """Count from zero again."""
        for counts in (self.passes, self.filled_rows, self.padded_rows, self._missing):
            counts.clear()

    # ---- what it tells ------------------------------------------------------------------------

    def report(self) -> list[dict[str, Any]]:
        """One row per captured key and per range of sizes that runs eagerly: why, and what the user could change."""
        rows: list[dict[str, Any]] = []
        for g in self.graphs():
            shape = {"program": g.key.program, **dataclasses.asdict(g.key.shape), "features": g.key.features.label}
            cost = {"bytes": g.cost_bytes, "ms": round(g.replay_ms, 3), "capture_ms": round(1e3 * g.capture_seconds, 1)}
            rows.append({**shape, "kind": g.kind, "breaks": g.breaks, **cost, "reason": "", "advice": ""})
        for (name, width), planned in self._programs.items():
            off = not self.enabled or not self._captures(planned[0])
            for buckets in planned[:1] if off else (*planned, *self._variants[name, width]):
                if buckets.on_demand and buckets.shapes and not off:
                    shape = {"program": name, "rows": "any", "width": buckets.shapes[0].width}
                    rows.append(
                        {**shape, "features": buckets.features.label, "kind": "lazy", "reason": "", "advice": ""}
                    )
                    continue
                for sizes, tokens, reason in self._eager_sizes(buckets):
                    shape = {"program": name, "rows": sizes, "width": tokens, "features": buckets.features.label}
                    rows.append({**shape, "kind": "eager", "reason": reason.value, "advice": reason.advice})
        return rows

    def costs(self) -> dict[str, float]:
        """What all graphs cost; ``budget`` in bytes, -1 for none. ``padding_share`` of the rows that were replayed."""
        filled, padded = self.filled_rows.total(), self.padded_rows.total()
        costs = {name: variants[0].cost for (name, _), variants in self._programs.items()}
        launches = {name: cost.eager_ms for name, cost in costs.items() if cost is not None}
        return {
            **{f"{name}_launch_ms": round(ms, 3) for name, ms in launches.items() if not math.isinf(ms)},
            "graphs": sum(1 for _ in self.graphs()),
            "bytes": self.graph_bytes,
            "budget": -1 if self.budget is None else self.budget,
            "capture_seconds": round(self.capture_seconds, 3),
            "idle_captures": self.idle_captures,
            "padding_share": round(padded / max(1, filled + padded), 4),
        }

    def _eager_sizes(self, buckets: Buckets) -> Iterator[tuple[str, int | str, Reason]]:
        """(rows, width, reason) of the sizes that would run eagerly now."""
        if not self.enabled or not self._captures(buckets):
            answer = self.plan(buckets.key(buckets.shapes[0] if buckets.shapes else Shape(1, buckets.width)))
            if isinstance(answer, Eager):
                yield "any", "any", answer.reason
            return
        low, first, reason, last = 1, 1, None, 0
        for shape in buckets.shapes:
            answer = self.plan(buckets.key(shape))
            now = answer.reason if isinstance(answer, Eager) else None
            if now is not reason:
                if reason is not None:
                    yield f"{first}-{last}", shape.width, reason
                first, reason = low, now
            low, last = shape.rows + 1, shape.rows
        if reason is not None:
            yield f"{first}-{last}", buckets.shapes[-1].width, reason

    def close(self) -> None:
        """Free every graph, before the process group and the memory they were captured on."""
        for graph in self.graphs():
            graph.close()
        for held in (self._graphs, self._answers, self._eager_buffers, self._programs, self._variants):
            held.clear()  # the programs hold the model and the cache that they were made of


def _worthwhile(buckets: Buckets, graphs: Sequence[Graph] = ()) -> list[Shape]:
    """The shapes worth capturing beside ``graphs``, which are there."""
    if buckets.passes is None or buckets.cost is None:
        return list(buckets.shapes)
    there = {graph.key.shape.rows for graph in graphs if graph.key.features == buckets.features}
    chosen = choose([shape.rows for shape in buckets.shapes], buckets.cost, buckets.passes, there)
    return [shape for shape in buckets.shapes if shape.rows in chosen]
