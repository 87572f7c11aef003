"""The planner: which keys are captured, and whether a pass replays or runs eagerly, and why.

Owns every graph and every count. The engine asks :meth:`Planner.launch` for each pass; nobody else
decides whether a graph fits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.graphs.full import FullGraph
from unisono.graphs.tape import Tape
from unisono.program import NO_NEEDS, Buffers, Eager, Graph, Key, Needs, Pending, Program, Reason, Replay, Shape


@dataclass(frozen=True)
class Buckets:
    """The shapes to capture of one program. Empty ``shapes`` with a ``reason``: it runs eagerly."""

    program: Program
    shapes: tuple[Shape, ...] = ()
    needs: Needs = NO_NEEDS
    reason: Reason | None = None


def row_buckets(limit: int) -> tuple[int, ...]:
    """Row counts to capture for: dense where padding hurts most, never above ``limit``."""
    counts = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32)]
    return tuple(sorted({*(c for c in counts if c < limit), limit}))


def token_buckets(limit: int) -> tuple[int, ...]:
    """Token counts to capture prompt passes for, up to ``limit``: a pass is padded by half at most, from 32 on."""
    counts = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    return tuple(c for c in counts if c <= limit)


class Planner:
    """Captures graphs at start and chooses one for each pass.

    ``launch`` is the only door: it loads the batch, replays or runs eagerly, counts which, and returns
    the pending outputs.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.device, self.enabled = device, enabled
        self.passes: Counter[tuple[str, str, str]] = Counter()  # (program, kind, reason) -> passes
        # Rows of replayed graphs by program (tokens of an extend pass): with a request in them, and without.
        self.filled_rows: Counter[str] = Counter()
        self.padded_rows: Counter[str] = Counter()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._programs: dict[str, Buckets] = {}
        self._graphs: dict[tuple[str, int], list[Graph]] = {}
        self._dropped: set[Key] = set()
        self._eager_buffers: dict[Key, Buffers] = {}

    def capture(self, plan: Sequence[Buckets], progress: Callable[[Graph], None] = lambda graph: None) -> None:
        """Capture every bucket, largest first, into one pool; ``progress`` is called after each.

        A bucket that runs out of memory is dropped: passes of its size run eagerly and count NO_MEMORY.
        """
        for buckets in plan:
            self._programs[buckets.program.name] = buckets
        if not self.enabled:
            return
        keys = [(b, Key(b.program.name, s, b.needs)) for b in plan for s in b.shapes]
        for buckets, key in sorted(keys, key=lambda k: k[1].shape.rows * k[1].shape.width, reverse=True):
            try:
                graph = self._capture(buckets.program, key)
            except torch.OutOfMemoryError:
                self._dropped.add(key)
                torch.cuda.empty_cache()
                continue
            self._graphs.setdefault((key.program, key.shape.width), []).insert(0, graph)
            progress(graph)

    def _capture(self, program: Program, key: Key) -> Graph:
        buffers = Buffers(program.schema, key.shape, self.device)
        if self._pool is None:
            return Tape(program, key, buffers)
        return FullGraph(program, key, buffers, self._pool)

    def plan(self, key: Key) -> Replay | Eager:
        """Replay the smallest graph whose key covers this one, or say why none does."""
        buckets = self._programs[key.program]
        if not self.enabled:
            return Eager(Reason.DISABLED)
        if buckets.reason is not None:
            return Eager(buckets.reason)
        graphs = self._graphs.get((key.program, key.shape.width), [])
        for graph in graphs:
            if graph.key.covers(key):
                return Replay(graph)
        if any(dropped.covers(key) for dropped in self._dropped):
            return Eager(Reason.NO_MEMORY)
        if all(graph.key.shape.rows < key.shape.rows for graph in graphs) and graphs:
            return Eager(Reason.ABOVE_BUCKETS)
        return Eager(Reason.NOT_CAPTURED)

    def launch(self, key: Key, batch: Mapping[str, object]) -> Pending:
        """Load the batch, run the pass as planned, count it, and start fetching its outputs."""
        answer = self.plan(key)
        if isinstance(answer, Replay):
            graph = answer.graph
            graph.buffers.load(batch)
            graph.replay()
            self.passes[key.program, graph.kind, ""] += 1
            self.padded_rows[key.program] += graph.key.shape.rows - key.shape.rows
            self.filled_rows[key.program] += key.shape.rows
            return graph.buffers.fetch()
        program = self._programs[key.program].program
        buffers = self._eager(program, key)
        buffers.load(batch)
        if program.prepare is not None:
            program.prepare(buffers)
        program.run(buffers)
        self.passes[key.program, "eager", answer.reason.name] += 1
        return buffers.fetch()

    def _eager(self, program: Program, key: Key) -> Buffers:
        """Buffers of exactly this shape: an eager pass pays for no padding."""
        buffers = self._eager_buffers.get(key)
        if buffers is None:
            if len(self._eager_buffers) >= 64:  # small tensors, but prompts come in every length
                self._eager_buffers.pop(next(iter(self._eager_buffers)))
            buffers = self._eager_buffers[key] = Buffers(program.schema, key.shape, self.device)
        return buffers

    def forget(self) -> None:
        """Count from zero again."""
        for counts in (self.passes, self.filled_rows, self.padded_rows):
            counts.clear()

    def report(self) -> list[dict[str, object]]:
        """One row per captured key, and one per program that runs eagerly, with its reason."""
        rows: list[dict[str, object]] = []
        for graphs in self._graphs.values():
            for g in graphs:
                cost = {"kind": g.kind, "bytes": g.cost_bytes, "ms": round(1e3 * g.cost_seconds, 1)}
                rows.append({"program": g.key.program, **dataclasses.asdict(g.key.shape), **cost, "reason": ""})
        for key in self._dropped:
            rows.append(
                {
                    "program": key.program,
                    **dataclasses.asdict(key.shape),
                    "kind": "eager",
                    "reason": Reason.NO_MEMORY.value,
                }
            )
        for name, buckets in self._programs.items():
            reason = buckets.reason if self.enabled else Reason.DISABLED
            if reason is not None:
                rows.append({"program": name, "rows": "any", "width": "any", "kind": "eager", "reason": reason.value})
        return rows

    def close(self) -> None:
        """Free every graph, before the process group and the memory they were captured on."""
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.close()
        self._graphs.clear()
        self._eager_buffers.clear()
