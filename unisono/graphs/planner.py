"""The planner: decides which graphs are captured, and whether a pass replays one or runs eagerly, and why.

There is one planner, that of rank 0. It reads the times and sizes that the graph set of its own worker has measured
and sends its decisions as commands (:mod:`unisono.graphs.graph_set`). The engine calls :meth:`Planner.launch` for each
pass; nothing else decides whether a graph fits.
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
    Key,
    Logits,
    PendingOutputs,
    Reason,
    Replay,
    Shape,
)
from unisono.graphs.buckets import Buckets, kept, worthwhile
from unisono.graphs.cost import PassCost
from unisono.graphs.graph_set import Capture, GraphCommand, GraphSet, Launch, Measure, Release

logger = logging.getLogger(__name__)

KEPT_ANSWERS = 4096
"""Keys whose answer is remembered, at most."""

WAITED_SHARE = 0.25
"""The share of the host's launches that an eager pass costs beside its own time where requests wait for outputs of the
pass before it: these are read only when it is launched."""


class Planner:
    """Decides which graphs are captured, chooses one for each pass, and counts both.

    graphs: the graph set of rank 0's own worker, whose measured times and sizes decide.
    send: executes a command on every rank and returns the outputs of a launched pass; by default on ``graphs`` alone.
    enabled: False runs everything eagerly. budget: bytes that graphs may take; None: no limit.
    ``idle_captures`` counts graphs that were captured after the start.
    """

    def __init__(
        self,
        graphs: GraphSet,
        send: Callable[[GraphCommand], PendingOutputs | None] | None = None,
        enabled: bool = True,
        budget: int | None = None,
    ) -> None:
        self.graph_set, self._send, self.budget = graphs, send or graphs.execute, budget
        self.passes: Counter[tuple[str, str, str]] = Counter()  # (program, kind, reason) -> passes
        # Rows of replayed graphs by program (tokens, for an extend pass): with a request, and padding.
        self.filled_rows: Counter[str] = Counter()
        self.padded_rows: Counter[str] = Counter()
        self.idle_captures = 0
        self.capture_seconds = 0.0
        self._kept_bytes = 0  # of released graphs, in the pool as long as the pool lives
        # By program and width: variants with fewer features first. ``_variants``: features that appeared at run time.
        self._programs: dict[tuple[str, int], list[Buckets]] = {}
        self._variants: dict[tuple[str, int], list[Buckets]] = {}
        self._dropped: dict[Key, Reason] = {}
        # Answers of ``plan`` by key and whether requests wait, until a graph is captured or released.
        self._answers: dict[tuple[Key, bool], Replay | Eager] = {}
        self._launchable: dict[tuple[Key, bool], Replay | Eager] = {}  # the same, after a capture on demand
        self._later: list[Key] = []  # to be captured when the engine is idle, the next one last
        self._missing: Counter[Key] = Counter()  # keys without a graph -> milliseconds that one would have saved
        self.enabled = enabled

    @property
    def enabled(self) -> bool:
        """Whether passes may replay graphs."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        self._forget_answers()

    def _forget_answers(self) -> None:
        self._answers.clear()
        self._launchable.clear()

    # ---- capture ------------------------------------------------------------------------------

    def capture(self, plan: Sequence[Buckets], progress: Callable[[float], None] = lambda share: None) -> None:
        """Capture the shapes of ``plan`` that are worth it, largest first. ``progress`` is called with the share done.

        A shape that does not fit is dropped: passes of its size run eagerly and count NO_MEMORY or OVER_BUDGET.
        """
        started = time.perf_counter()
        self._forget_answers()
        self._programs = {(buckets.program.name, buckets.width): [] for buckets in plan}
        self._variants = {name: [] for name in self._programs}
        for buckets in plan:
            variants = self._programs[buckets.program.name, buckets.width]
            if buckets.like is not None:
                buckets = dataclasses.replace(buckets, cost=self._programs[buckets.like][0].cost)
            if self.enabled and buckets.measured and self._captures(buckets):
                # More features change the cost of a pass very little.
                like = variants[0] if variants else self._measure(buckets)
                buckets = dataclasses.replace(buckets, cost=like.cost, shapes=like.shapes, unfit=like.unfit)
            if buckets.on_demand:
                buckets = dataclasses.replace(buckets, shapes=tuple(worthwhile(buckets)))
            variants.append(buckets)
        if self.enabled:
            every = [b for variants in self._programs.values() for b in variants if self._captures(b)]
            wanted = [(b, s) for b in every if not b.on_demand for s in worthwhile(b, self._graphs_of(b))]
            wanted.sort(key=lambda w: (not w[0].spare, w[1].rows * w[1].width), reverse=True)
            later = [b.key(s) for b in every for s in kept(b)] + [b.key(s) for b, s in wanted if b.later]
            self._later = list(dict.fromkeys(later))[::-1]
            wanted = [(b, s) for b, s in wanted if not b.later]
            for done, (buckets, shape) in enumerate(wanted, 1):
                self._add(buckets, buckets.key(shape))
                progress(done / len(wanted))
        self.capture_seconds += time.perf_counter() - started

    def capture_missing(self) -> int:
        """Capture a graph that was left for later, else the missing one that would have saved most time, if it pays.

        For an idle engine: it blocks. Returns how many graphs were captured: 0 or 1.
        """
        while self._later:
            key = self._later.pop()
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

    def _capture_idle(self, key: Key) -> bool:
        started = time.perf_counter()
        if self._add(self._buckets(key), key) is None:
            return False
        self.idle_captures += 1
        self.capture_seconds += time.perf_counter() - started
        return True

    @property
    def graph_bytes(self) -> int:
        """Bytes of all graphs, and of released graphs whose memory the pool keeps."""
        return self._kept_bytes + sum(graph.cost_bytes for graph in self.graph_set)

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

    def _measure(self, buckets: Buckets) -> Buckets:
        """Measure what a pass costs: the smallest shape and those at edges as graphs, the largest shape eagerly.

        The largest shape is captured too where the host's launches hide the device's time. A graph that takes longer
        than launching its pass from the host is released: there an eager pass is as fast.
        """
        small, large = buckets.shapes[0], buckets.shapes[-1]
        launches, device = self._timed(buckets, large)
        host = math.inf if buckets.always else max(launches, self._timed(buckets, small)[0])
        points = {}
        for shape in reversed(buckets.shapes):  # large graphs first: smaller ones reuse their memory
            wanted = shape.rows in buckets.edges or shape is small
            if wanted or (shape is large and device < 2 * launches):
                graph = self._add(buckets, buckets.key(shape), tried=not wanted)
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
        """Release a graph that was measured. Other captures may reuse its memory; the pool keeps it while it lives."""
        self._send(Release(graph.key))
        self._forget_answers()
        if self.graph_set.pooled:
            self._kept_bytes = self._kept_bytes + graph.cost_bytes if len(self.graph_set) else 0

    def _timed(self, buckets: Buckets, shape: Shape) -> tuple[float, float]:
        """Milliseconds of an eager pass on padding: until the host has launched it, and until it is done."""
        key = buckets.key(shape)
        self._send(Measure(key))
        return self.graph_set.eager_ms[key]

    def _add(self, buckets: Buckets, key: Key, tried: bool = False) -> Graph | None:
        """Capture a graph for ``key`` unless there is one; None where memory or the budget does not allow it.

        tried: the graph is captured to be measured, so its lack is not noted as a reason for eager passes.
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
                self._forget_answers()
                return graph
            reason, graph = Reason.OVER_BUDGET, None
        self._send(Release(key))  # also after a failed capture: it may have failed on this rank only
        if not tried:
            self._drop(key, reason)
        return None

    def _affordable(self, buckets: Buckets, graph: Graph) -> bool:
        """Whether all graphs fit the budget, and those of this graph's program fit the program's share of it."""
        if self.budget is None:
            return True
        own = sum(g.cost_bytes for g in self.graph_set if g.key.program == graph.key.program)
        return self.graph_bytes <= self.budget and own <= buckets.share * self.budget

    def _drop(self, key: Key, reason: Reason) -> None:
        self._dropped[key] = reason
        self._forget_answers()
        shape = f"{key.shape.rows} rows" + (f" × {key.shape.width}" if key.shape.width > 1 else "")
        level = logging.WARNING if reason is Reason.NO_MEMORY else logging.INFO  # a budget is kept on purpose
        logger.log(level, "No graph of %s for %s: %s. Advice: %s.", shape, key.program, reason.value, reason.advice)

    # ---- passes -------------------------------------------------------------------------------

    def pass_ms(self, key: Key) -> float | None:
        """Milliseconds of a replay on padding, measured when the graph was captured; None where no graph serves."""
        answer = self.plan(key)
        return answer.graph.replay_ms if isinstance(answer, Replay) else None

    def expected_ms(self, key: Key) -> float:
        """:meth:`pass_ms`, else the known cost of an eager pass; 0 where nothing is known."""
        cost = self._buckets(key).cost
        return self.pass_ms(key) or (cost.replay(key.shape.rows) if cost is not None else 0.0)

    def launched_ms(self, key: Key) -> float:
        """What the planned replay or eager pass takes by the known costs, the host's launches included; where no costs
        are known, :meth:`pass_ms` or 0. A single replay by an idle device would say too much: its clock is low."""
        cost, answer = self._buckets(key).cost, self.plan(key)
        if cost is None:
            return self.pass_ms(key) or 0.0
        return cost.replay(answer.graph.key.shape.rows) if isinstance(answer, Replay) else cost.eager(key.shape.rows)

    def _buckets(self, key: Key) -> Buckets:
        """The buckets of passes with this key's features: exactly these, else a planned superset.

        Else the planned buckets with the most of these features, extended by the rest.
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

    def filled(self, key: Key) -> int:
        """Rows of the largest graph that a pass with at most this key's rows fills; 0 where there is none, and where
        every pass replays a graph."""
        buckets = self._buckets(key)
        if not self.enabled or buckets.mode == "off" or buckets.cost is None or math.isinf(buckets.cost.eager_ms):
            return 0
        serving = (g.key for g in self._graphs_of(buckets) if g.key.features.covers(key.features))
        return max((serves.shape.rows for serves in serving if serves.shape.rows <= key.shape.rows), default=0)

    def plan(self, key: Key, waited: bool = False) -> Replay | Eager:
        """Replay the smallest graph that covers the key, exactly its features first; or the reason why none does.

        waited: requests wait for outputs of the pass before this one.
        """
        answer = self._answers.get((key, waited))
        if answer is None:
            if len(self._answers) >= KEPT_ANSWERS:  # prompts come in every length
                self._answers.clear()
            answer = self._answers[key, waited] = self._plan(key, waited)
        return answer

    def _plan(self, key: Key, waited: bool) -> Replay | Eager:
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

    def launch(
        self, key: Key, batch: Mapping[str, object], waited: bool = False, timed: bool = False
    ) -> PendingOutputs:
        """Send the pass with this batch, as planned, and count it. Returns its outputs on their way to the host.

        waited: see :meth:`plan`. timed: the outputs tell what the device took; two events more of the host's time.
        """
        answer = self._launchable.get((key, waited)) or self._launch_plan(key, waited)
        if isinstance(answer, Replay):
            graph = answer.graph
            outputs = self._send(Launch(key, graph.key, batch, timed))
            self.passes[key.program, graph.kind, ""] += 1
            self.padded_rows[key.program] += graph.key.shape.rows - key.shape.rows
            self.filled_rows[key.program] += key.shape.rows
        else:
            outputs = self._send(Launch(key, None, batch, timed))
            self.passes[key.program, "eager", answer.reason.name] += 1
            self._note_missing(key, answer.reason)
        assert outputs is not None
        return outputs

    def _launch_plan(self, key: Key, waited: bool) -> Replay | Eager:
        """:meth:`plan`, after the capture on demand of a graph for this key."""
        self.capture_for(key)
        answer = self.plan(key, waited)
        if len(self._launchable) >= KEPT_ANSWERS:
            self._launchable.clear()
        self._launchable[key, waited] = answer
        return answer

    def capture_for(self, key: Key) -> None:
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

    def _note_missing(self, key: Key, reason: Reason) -> None:
        """Note which graph would have served this pass better, and the time that it would have saved."""
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

    def forget(self) -> None:
        """Set the counts of passes to zero."""
        for counts in (self.passes, self.filled_rows, self.padded_rows, self._missing):
            counts.clear()

    # ---- reports ------------------------------------------------------------------------

    def report(self) -> list[dict[str, Any]]:
        """A row for each graph, and for each range of sizes that runs eagerly: the reason, and what the user can do."""
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
        """The costs of all graphs. budget: bytes, -1 for none. padding_share: of the rows of replayed passes."""
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
        """Forget the plan, whose programs hold the model and the cache."""
        for held in (self._programs, self._variants):
            held.clear()
        self._forget_answers()


def _rows(graph: Graph) -> int:
    return graph.key.shape.rows
