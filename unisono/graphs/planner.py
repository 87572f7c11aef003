"""The planner decides which graphs are captured, and for each pass whether it replays a graph or runs eagerly, and why.

Only rank 0 has a planner. It reads the times and sizes measured by its own worker's graph set, and has graphs captured
and freed by commands (:mod:`unisono.graphs.graph_set`). For each pass it returns a command (:meth:`Planner.launch`),
which the runner sends; nothing else decides whether a graph fits.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from unisono.graphs import (
    Eager,
    Graph,
    GraphKey,
    Logits,
    PassShape,
    Reason,
    Replay,
)
from unisono.graphs.buckets import Buckets, idle_shapes, worthwhile
from unisono.graphs.cost import PassCost
from unisono.graphs.graph_set import Capture, GraphCommand, GraphSet, Launch, Measure, Release

logger = logging.getLogger(__name__)

MAX_CACHED_PLANS = 4096
"""Maximum number of keys whose plan is cached."""

WAITED_SHARE = 0.25
"""Fraction of the host launch time that an eager pass costs in addition, if requests wait for outputs of the pass
before it: these are read only after it is launched."""


class Planner:
    """Decides which graphs are captured, chooses one for each pass, and counts both.

    graphs: graph set of rank 0's own worker, whose measured times and sizes are used.
    send: executes a command that captures, measures or frees on every rank; by default on ``graphs`` alone.
    enabled: False runs everything eagerly.
    budget: bytes available for graphs (``engine/startup/memory.py``), compared with the cost of each captured graph; a
    graph beyond it is released. None: no limit. ``idle_captures`` counts graphs captured after the start.
    known: costs of passes by :attr:`Buckets.label`, which are not measured again; ``measured`` has those in use.
    """

    def __init__(
        self,
        graphs: GraphSet,
        send: Callable[[GraphCommand], object] | None = None,
        enabled: bool = True,
        budget: int | None = None,
        known: Mapping[str, PassCost] | None = None,
    ) -> None:
        self.graph_set, self._send, self.budget = graphs, send or graphs.execute, budget
        self._known, self.measured = known or {}, dict[str, PassCost]()
        self.passes: Counter[tuple[str, str, str]] = Counter()  # (program, kind, reason) -> passes
        # Rows of replayed graphs by program (tokens, for an extend pass): (used, padding).
        self.filled_rows: Counter[str] = Counter()
        self.padded_rows: Counter[str] = Counter()
        self.idle_captures = 0
        self.capture_seconds = 0.0
        self._released_bytes = 0  # bytes of released graphs, kept by the pool
        # By program and width, variants with fewer features first. ``_variants``: features first seen at run time.
        self._programs: dict[tuple[str, int], list[Buckets]] = {}
        self._variants: dict[tuple[str, int], list[Buckets]] = {}
        self._dropped: dict[GraphKey, Reason] = {}
        # Results of ``plan`` by (key, waited), until a graph is captured or released.
        self._plans: dict[tuple[GraphKey, bool], Replay | Eager] = {}
        self._launch_plans: dict[tuple[GraphKey, bool], Replay | Eager] = {}  # the same, after a capture on demand
        self._deferred: list[GraphKey] = []  # to capture when the engine is idle, next one last
        self._missing: Counter[GraphKey] = Counter()  # keys without a graph -> milliseconds a graph would have saved
        self.enabled = enabled

    @property
    def enabled(self) -> bool:
        """True if passes may replay graphs."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        self._clear_plans()

    def _clear_plans(self) -> None:
        self._plans.clear()
        self._launch_plans.clear()

    # ---- capture ------------------------------------------------------------------------------

    def capture(self, plan: Sequence[Buckets], progress: Callable[[float], None] = lambda share: None) -> None:
        """Capture the worthwhile shapes of ``plan``, largest first. ``progress`` is called with the fraction done.

        A shape that does not fit is dropped: passes of its size run eagerly and count NO_MEMORY or OVER_BUDGET.
        """
        started = time.perf_counter()
        self._clear_plans()
        self._programs = {(buckets.program.name, buckets.width): [] for buckets in plan}
        self._variants = {name: [] for name in self._programs}
        for buckets in plan:
            variants = self._programs[buckets.program.name, buckets.width]
            if buckets.cost_like is not None:
                buckets = dataclasses.replace(buckets, cost=self._programs[buckets.cost_like][0].cost)
            if self.enabled and buckets.measured and self._captures(buckets):
                # Additional features barely change the cost of a pass.
                like = variants[0] if variants else self._costed(buckets)
                buckets = dataclasses.replace(buckets, cost=like.cost, shapes=like.shapes, unfit=like.unfit)
            if buckets.on_demand:
                buckets = dataclasses.replace(buckets, shapes=tuple(worthwhile(buckets)))
            variants.append(buckets)
        if self.enabled:
            every = [b for variants in self._programs.values() for b in variants if self._captures(b)]
            chosen = [(b, s) for b in every if not b.on_demand for s in worthwhile(b, self._graphs_of(b))]
            chosen.sort(key=lambda w: (not w[0].spare, w[1].rows * w[1].width), reverse=True)
            deferred = [b.key(s) for b in every for s in idle_shapes(b)] + [b.key(s) for b, s in chosen if b.deferred]
            self._deferred = list(dict.fromkeys(deferred))[::-1]
            chosen = [(b, s) for b, s in chosen if not b.deferred]
            for done, (buckets, shape) in enumerate(chosen, 1):
                self._add(buckets, buckets.key(shape))
                progress(done / len(chosen))
        self.capture_seconds += time.perf_counter() - started

    def capture_missing(self) -> int:
        """Capture a deferred graph or, if it pays, the missing one that would have saved most time.

        For an idle engine: it blocks. Returns the number of captured graphs: 0 or 1.
        """
        while self._deferred:
            key = self._deferred.pop()
            if key not in self._dropped and self.graph_set.get(key) is None and self._capture_idle(key):
                return 1
        for key, saved in self._missing.most_common():
            cost = self._buckets(key).cost
            if cost is not None and saved < cost.capture(key.shape.rows):
                continue
            del self._missing[key]
            if self._capture_idle(key):
                return 1
        return 0

    def _capture_idle(self, key: GraphKey) -> bool:
        started = time.perf_counter()
        if self._add(self._buckets(key), key) is None:
            return False
        self.idle_captures += 1
        self.capture_seconds += time.perf_counter() - started
        return True

    @property
    def graph_bytes(self) -> int:
        """Bytes of all graphs, and of released graphs whose memory the pool keeps."""
        return self._released_bytes + sum(graph.cost_bytes for graph in self.graph_set)

    def graphs(self) -> Iterator[Graph]:
        """Every captured graph, grouped by program and width, ascending in rows."""
        groups: dict[tuple[str, int], list[Graph]] = {}
        for graph in self.graph_set:
            groups.setdefault((graph.key.program, graph.key.shape.width), []).append(graph)
        for group in groups.values():
            yield from sorted(group, key=_rows)

    def _graphs_of(self, buckets: Buckets) -> list[Graph]:
        """The graphs of the buckets' program and width, ascending in rows."""
        of = buckets.program.name, buckets.width
        return sorted((g for g in self.graph_set if (g.key.program, g.key.shape.width) == of), key=_rows)

    def _captures(self, buckets: Buckets) -> bool:
        return buckets.mode != "off" and bool(buckets.shapes)

    def _costed(self, buckets: Buckets) -> Buckets:
        """The buckets with the cost of a pass, known from an earlier start or measured."""
        cost = self._known.get(buckets.label)
        if cost is None:
            found = self._measure(buckets)
            if found.cost is None or found.shapes != buckets.shapes:
                return found
            cost = found.cost
        self.measured[buckets.label] = cost
        return dataclasses.replace(buckets, cost=cost)

    def _measure(self, buckets: Buckets) -> Buckets:
        """Measure the cost of a pass: the smallest shape and those at edges as graphs, the largest shape eagerly.

        The largest shape is captured too if the host's launches hide the device's time. A graph slower than launching
        its pass from the host is released, since an eager pass is as fast.
        """
        small, large = buckets.shapes[0], buckets.shapes[-1]
        launches, device = self._timed(buckets, large)
        host = math.inf if buckets.always else max(launches, self._timed(buckets, small)[0])
        points = {}
        for shape in reversed(buckets.shapes):  # large graphs first: smaller ones reuse their memory
            at_edge = shape.rows in buckets.edges or shape is small
            if at_edge or (shape is large and device < 2 * launches):
                graph = self._add(buckets, buckets.key(shape), for_measurement=not at_edge)
                if graph is not None:
                    points[shape.rows] = graph.replay_ms
                    if graph.replay_ms > host:
                        self._release(graph)
        if graph is None:
            return dataclasses.replace(buckets, shapes=(), unfit=self._dropped[buckets.key(small)])
        points.setdefault(large.rows, device)
        known = {"capture_ms": 1e3 * graph.capture_seconds, "graph_bytes": graph.cost_bytes}
        return dataclasses.replace(buckets, cost=PassCost.measured(points, buckets.flat, eager_ms=host, **known))

    def _release(self, graph: Graph) -> None:
        """Release a measured graph. Other captures may reuse its memory; the pool keeps it as long as it lives."""
        self._send(Release(graph.key))
        self._clear_plans()
        if self.graph_set.pooled:
            self._released_bytes = self._released_bytes + graph.cost_bytes if len(self.graph_set) else 0

    def _timed(self, buckets: Buckets, shape: PassShape) -> tuple[float, float]:
        """Milliseconds of an eager pass on padding: until the host has launched it, and until it is done."""
        key = buckets.key(shape)
        self._send(Measure(key))
        return self.graph_set.eager_ms[key]

    def _add(self, buckets: Buckets, key: GraphKey, for_measurement: bool = False) -> Graph | None:
        """Capture a graph for ``key`` unless there is one; None if memory or the budget does not allow it.

        for_measurement: the graph is only measured, so a failure is not recorded as a reason of eager passes.
        """
        if (there := self.graph_set.get(key)) is not None:
            return there
        try:
            self._send(Capture(key, buckets.mode == "segmented"))
        except torch.OutOfMemoryError:
            reason = Reason.NO_MEMORY
        else:
            graph = self.graph_set.get(key)
            if graph is not None and self._affordable(buckets, graph):
                self._clear_plans()
                return graph
            reason, graph = Reason.OVER_BUDGET, None
        self._send(Release(key))  # also after a failure, which may be this rank's only
        if not for_measurement:
            self._drop(key, reason)
        return None

    def _affordable(self, buckets: Buckets, graph: Graph) -> bool:
        """Return True if all graphs fit the budget, and the graphs of this one's program fit the program's share."""
        if self.budget is None:
            return True
        own = sum(g.cost_bytes for g in self.graph_set if g.key.program == graph.key.program)
        return self.graph_bytes <= self.budget and own <= buckets.share * self.budget

    def _drop(self, key: GraphKey, reason: Reason) -> None:
        self._dropped[key] = reason
        self._clear_plans()
        shape = f"{key.shape.rows} rows" + (f" × {key.shape.width}" if key.shape.width > 1 else "")
        level = logging.WARNING if reason is Reason.NO_MEMORY else logging.INFO  # a budget is a deliberate limit
        logger.log(level, "No graph of %s for %s: %s. Advice: %s.", shape, key.program, reason.value, reason.advice)

    # ---- passes -------------------------------------------------------------------------------

    def pass_ms(self, key: GraphKey) -> float | None:
        """Milliseconds of a replay on padding, measured at capture; None if no graph serves the key."""
        answer = self.plan(key)
        return answer.graph.replay_ms if isinstance(answer, Replay) else None

    def expected_ms(self, key: GraphKey) -> float:
        """:meth:`pass_ms`, else the known cost of an eager pass; 0 if nothing is known."""
        cost = self._buckets(key).cost
        return self.pass_ms(key) or (cost.replay(key.shape.rows) if cost is not None else 0.0)

    def launched_ms(self, key: GraphKey) -> float:
        """Milliseconds of the planned replay or eager pass by the known costs, including the host's launches. If no
        costs are known, :meth:`pass_ms` or 0. A single replay on an idle device would overestimate, because its clock
        is low.
        """
        cost, answer = self._buckets(key).cost, self.plan(key)
        if cost is None:
            return self.pass_ms(key) or 0.0
        return cost.replay(answer.graph.key.shape.rows) if isinstance(answer, Replay) else cost.eager(key.shape.rows)

    def _buckets(self, key: GraphKey) -> Buckets:
        """Buckets for a key's features: the exact plan, else a planned superset, else the largest planned subset,
        extended."""
        planned, variants = (of[key.program, key.shape.width] for of in (self._programs, self._variants))
        same = (b for b in (*planned, *variants) if b.features == key.features)
        more = (b for b in planned if b.features.covers(key.features))
        if (found := next(itertools.chain(same, more), None)) is None:
            most = dataclasses.replace(key.features, logits=Logits.ALL)  # graphs with all logits serve every level
            *_, base = (planned[0], *(b for b in planned if most.covers(b.features)))
            found = dataclasses.replace(base, features=key.features)
            variants.append(found)
        return found

    def full_graph_rows(self, key: GraphKey) -> int:
        """Rows of the largest graph that a pass with at most this key's rows fills; 0 if there is none, or if every
        pass replays a graph."""
        buckets = self._buckets(key)
        if not self.enabled or buckets.mode == "off" or buckets.cost is None or math.isinf(buckets.cost.eager_ms):
            return 0
        serving = (g.key for g in self._graphs_of(buckets) if g.key.features.covers(key.features))
        return max((serves.shape.rows for serves in serving if serves.shape.rows <= key.shape.rows), default=0)

    def plan(self, key: GraphKey, waited: bool = False) -> Replay | Eager:
        """Replay the smallest graph that covers the key, preferring its exact features; else return the reason why none
        does.

        waited: requests wait for outputs of the pass before this one.
        """
        answer = self._plans.get((key, waited))
        if answer is None:
            if len(self._plans) >= MAX_CACHED_PLANS:  # prompts come in every length
                self._plans.clear()
            answer = self._plans[key, waited] = self._plan(key, waited)
        return answer

    def _plan(self, key: GraphKey, waited: bool) -> Replay | Eager:
        buckets = self._buckets(key)
        if not self.enabled or buckets.mode == "off":
            return Eager(Reason.DISABLED)
        rows, cost = key.shape.rows, buckets.cost
        graphs = self._graphs_of(buckets)
        large = [graph for graph in graphs if graph.key.shape.rows >= rows]
        for graph in (*(g for g in large if g.key.features == key.features), *large):
            if graph.key.covers(key):
                if cost is None or cost.replay(graph.key.shape.rows) <= cost.eager(rows, WAITED_SHARE * waited):
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

    def launch(self, key: GraphKey, batch: Mapping[str, object], waited: bool = False, timed: bool = False) -> Launch:
        """Return the planned launch of the pass with this batch, and count it. The caller sends it to every rank.

        waited: see :meth:`plan`. timed: record the device time, at the cost of two more events on the host.
        """
        answer = self._launch_plans.get((key, waited)) or self._launch_plan(key, waited)
        if isinstance(answer, Replay):
            graph = answer.graph
            self.passes[key.program, graph.kind, ""] += 1
            self.padded_rows[key.program] += graph.key.shape.rows - key.shape.rows
            self.filled_rows[key.program] += key.shape.rows
            return Launch(key, graph.key, batch, timed)
        self.passes[key.program, "eager", answer.reason.name] += 1
        self._note_missing(key, answer.reason)
        return Launch(key, None, batch, timed)

    def _launch_plan(self, key: GraphKey, waited: bool) -> Replay | Eager:
        """:meth:`plan`, after capturing a graph for this key on demand."""
        self.capture_for(key)
        answer = self.plan(key, waited)
        if len(self._launch_plans) >= MAX_CACHED_PLANS:
            self._launch_plans.clear()
        self._launch_plans[key, waited] = answer
        return answer

    def capture_for(self, key: GraphKey) -> None:
        """Capture the smallest shape that holds this key's rows, if its graphs are captured on demand.

        Does nothing for a shape that was captured or dropped.
        """
        buckets = self._buckets(key)
        shape = next((s for s in buckets.shapes if s.rows >= key.shape.rows), None)
        if shape is None or not (buckets.on_demand and self.enabled and self._captures(buckets)):
            return
        key = buckets.key(shape)
        if key in self._dropped or self.graph_set.get(key) is not None:
            return
        started = time.perf_counter()
        self._add(buckets, key)
        self.capture_seconds += time.perf_counter() - started

    def _note_missing(self, key: GraphKey, reason: Reason) -> None:
        """Record which graph would have served this pass better, and the time it would have saved."""
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

    def reset_counts(self) -> None:
        """Reset the counts of passes."""
        for counts in (self.passes, self.filled_rows, self.padded_rows, self._missing):
            counts.clear()

    # ---- reports ------------------------------------------------------------------------

    def report(self) -> list[dict[str, Any]]:
        """One row per graph, and per range of sizes that run eagerly: the reason, and the advice to the user."""
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
        """Costs of all graphs. budget: bytes, -1 for none. padding_share: fraction of padding rows in replayed
        passes."""
        filled, padded = self.filled_rows.total(), self.padded_rows.total()
        costs = {name: variants[0].cost for (name, _), variants in self._programs.items()}
        launches = {name: cost.eager_ms for name, cost in costs.items() if cost is not None}
        return {
            **{f"{name}_launch_ms": round(ms, 3) for name, ms in launches.items() if not math.isinf(ms)},
            "graphs": len(self.graph_set),
            "bytes": self.graph_bytes,
            "budget": -1 if self.budget is None else self.budget,
            "capture_seconds": round(self.capture_seconds, 3),
            "idle_captures": self.idle_captures,
            "padding_share": round(padded / max(1, filled + padded), 4),
        }

    def _eager_sizes(self, buckets: Buckets) -> Iterator[tuple[str, int | str, Reason]]:
        """(rows, width, reason) of the sizes that currently run eagerly."""
        if not self.enabled or not self._captures(buckets):
            answer = self.plan(buckets.key(buckets.shapes[0] if buckets.shapes else PassShape(1, buckets.width)))
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
        """Forget the plan, whose programs hold the model and the cache."""
        for held in (self._programs, self._variants):
            held.clear()
        self._clear_plans()


def _rows(graph: Graph) -> int:
    return graph.key.shape.rows
