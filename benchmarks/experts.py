"""A layer of experts on a GPU: are the bits the same at every number of tokens, and how long does it take?

    python -m benchmarks.experts [--only bits speed tune] [--tokens 1 64] [--shapes NAME …] [--tiny] [--out FILE.md]

Prints Markdown tables. *bits*: tokens of a batch of 4096 whose bits differ when computed in another company or tiling;
every number should be 0. *speed*: µs of a layer, router to next norm, over replays of a CUDA graph that walks through
several layers, and the floor: the bytes that must be read at 4.68 TB/s. *tune*: µs of each product by tile, for the
table ``TILES`` of ``unisono/kernels/moe/experts.py``. ``--tiny``: small sizes on the CPU's twins, without times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from unisono.kernels.gemm.tile import Tile
from unisono.kernels.moe.combine import combine_experts_norm
from unisono.kernels.moe.experts import (
    TILES,
    Step,
    expert_down,
    expert_gate_up,
    expert_tiles,
    expert_up,
    launch_down,
    launch_gate_up,
)
from unisono.kernels.moe.plan import LEAD_PAIRS, ExpertPlan, plan_experts
from unisono.kernels.moe.router import route

BYTES_PER_US = 4.68e6
TOKENS = (1, 4, 16, 64, 512, 4096)
BITS = (1, 2, 4, 15, 16, 17, 64, 100, 512, 1025, 4096)


@dataclass(frozen=True)
class Shape:
    """hidden size, experts, their size, chosen, shared experts beside them. gated: False: ReLU² in place of a gate."""

    hidden: int
    experts: int
    inner: int
    top_k: int
    shared: int
    gated: bool = True


SHAPES = {
    "35B-A3B": Shape(2048, 256, 512, 8, 1), "30B-A3B": Shape(2048, 128, 768, 8, 0),
    "GLM-4.7-Flash": Shape(2048, 64, 1536, 4, 1), "Nemotron-3-Nano": Shape(2688, 128, 1856, 6, 0, gated=False),
}  # fmt: skip
TINY = {"tiny": Shape(64, 12, 24, 3, 1)}


class Layer:
    """Random weights of one layer."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        s, self.shape, self.device = shape, shape, device

        def matrix(*sizes: int) -> torch.Tensor:
            weight = torch.empty(sizes, dtype=torch.bfloat16, device=device)
            return weight.normal_(0, sizes[-1] ** -0.5)

        self.router = matrix(s.experts + s.shared, s.hidden)
        self.gate_up = matrix(s.experts + s.shared, (1 + s.gated) * s.inner, s.hidden)
        self.down = matrix(s.experts + s.shared, s.hidden, s.inner)
        self.norm = torch.ones(s.hidden, dtype=torch.bfloat16, device=device)

    def tokens(self, count: int, seed: int = 1) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.randn(count, self.shape.hidden, device=self.device).to(torch.bfloat16)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return route(x, self.router, None, None, self.shape.experts, self.shape.top_k, True)

    def up(self, x: torch.Tensor, plan: ExpertPlan, tile: Tile | None = None) -> torch.Tensor:
        """The first product, on the kernels that serve it or, with a tile, on Triton's."""
        if tile is not None:
            launch = launch_gate_up if self.shape.gated else partial(launch_down, up=True)
            return launch(x, self.gate_up, plan, tile)
        return (expert_gate_up if self.shape.gated else expert_up)(x, self.gate_up, plan)

    def plan(self, ids: torch.Tensor, tile: int | None = None) -> ExpertPlan:
        pairs, experts = ids.numel(), self.shape.experts
        return plan_experts(ids, experts, tile or expert_tiles(pairs, experts, torch.bfloat16).rows)

    def combine(self, y: torch.Tensor, weights: torch.Tensor, gates: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        pairs = weights.numel()
        shared = (y[pairs:], gates) if self.shape.shared else (None, None)
        return combine_experts_norm(y[:pairs], weights, *shared, x, self.norm, 1e-6)[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights, gates = self.route(x)
        plan = self.plan(ids)
        y = expert_down(self.up(x, plan), self.down, plan)
        return self.combine(y, weights, gates, x)

    def sorted(self, x: torch.Tensor, rows: int, up: Tile, down: Tile) -> torch.Tensor:
        """The same by the sorted plan, whatever the number of tokens, in these tiles."""
        ids, weights, gates = self.route(x)
        plan = ExpertPlan(ids, self.shape.experts, rows, *torch.ops.unisono.sort_pairs(ids, self.shape.experts, rows))
        y = launch_down(self.up(x, plan, up), self.down, plan, down)
        return self.combine(y, weights, gates, x)


def differing(out: torch.Tensor, want: torch.Tensor) -> int:
    return int((out != want).any(1).sum())


def bits(layer: Layer, most: int) -> Iterator[tuple[str, int]]:
    """(what was compared, rows that differ)."""
    x = layer.tokens(most)
    want = layer(x)
    yield "NaN", int(want.isnan().any(1).sum())
    yield "alone", sum(differing(layer(x[i : i + 1]), want[i : i + 1]) for i in range(min(64, most)))
    for count in BITS:
        if count < most:
            yield f"{count} tokens", differing(layer(x[:count]), want[:count])
    order = torch.randperm(most, device=x.device)
    yield "shuffled", differing(layer(x[order]), want[order])
    yield "equal tokens", differing(layer(x[:1].expand(64, -1).contiguous()), want[:1].expand(64, -1))
    if layer.device == "cuda":
        few = LEAD_PAIRS // layer.shape.top_k
        for tiles in TILES.values():
            for count in (few, 512):
                name = f"sorted, {count} tokens, tiles of {tiles.rows}"
                yield name, differing(layer.sorted(x[:count], tiles.rows, tiles.up, tiles.down), want[:count])


def graph_us(calls: list[Callable[[], object]], repeats: int = 21) -> float:
    """Median µs of one call, over replays of a CUDA graph of them all."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def inputs(layer: Layer, count: int) -> list[torch.Tensor]:
    """Several batches, which choose other experts: together they read more than the L2 holds."""
    return [layer.tokens(count, seed) for seed in range({1: 24, 4: 8, 16: 4}.get(count, 2))]


def speed(layer: Layer, count: int) -> list[str]:
    """µs of a layer and of its parts, and the floor in bytes."""
    s, batches = layer.shape, inputs(layer, count)
    routed = [layer.route(x) for x in batches]
    plans = [layer.plan(ids) for ids, *_ in routed]
    hs = [layer.up(x, plan) for x, plan in zip(batches, plans, strict=True)]
    ys = [expert_down(h, layer.down, plan) for h, plan in zip(hs, plans, strict=True)]
    both = list(zip(batches, routed, plans, hs, ys, strict=True))
    taken = statistics.mean(ids.unique().numel() for ids, *_ in routed) + s.shared
    rows = count * (s.top_k + s.shared)
    moved = 2 * (taken * (2 + s.gated) * s.hidden * s.inner + s.experts * s.hidden + rows * 2 * (s.inner + s.hidden))
    times = {
        "layer": [lambda x=x: layer(x) for x in batches],
        "route": [lambda x=x: layer.route(x) for x in batches],
        "plan": [lambda r=r: layer.plan(r[0]) for r in routed],
        "up": [lambda x=x, p=p: layer.up(x, p) for x, _, p, _, _ in both],
        "down": [lambda h=h, p=p: expert_down(h, layer.down, p) for _, _, p, h, _ in both],
        "combine": [lambda x=x, r=r, y=y: layer.combine(y, r[1], r[2], x) for x, r, _, _, y in both],
    }
    cells = [str(count), f"{taken:.0f}", f"{moved / BYTES_PER_US:.1f}"]
    for name, calls in times.items():
        cells.append("–" if name == "plan" and count * s.top_k <= LEAD_PAIRS else f"{graph_us(calls):.1f}")
    return cells


def candidates(rows: int) -> Iterator[Tile]:
    """Tiles worth a try: 24 … 200 KiB in flight, accumulators that fit into registers."""
    for n in (16, 32, 64, 128, 256):
        for k in (64, 128, 256):
            for stages in (3, 4):
                in_flight, warps = (rows + n) * k * 2 * stages, 8 if rows * n >= 16384 else 4
                if 24 * 2**10 <= in_flight <= 200 * 2**10 and rows * n <= 32768:
                    yield Tile(rows, n, k, warps, stages, across=rows <= 16)


def tune(layer: Layer, count: int, steps: list[Step]) -> list[str]:
    """The present tiles and the best three of each product, µs. steps: tiles to try; none: :func:`candidates`."""
    batches = inputs(layer, count)
    ids = [layer.route(x)[0] for x in batches]
    now = expert_tiles(ids[0].numel(), layer.shape.experts, torch.bfloat16)
    plans = [layer.plan(each) for each in ids]
    hs = [layer.up(x, plan) for x, plan in zip(batches, plans, strict=True)]
    cells = [str(count), str(now.rows)]
    tried = [Tile(now.rows, *step, across=now.rows <= 16) for step in steps] or list(candidates(now.rows))
    for launch, rows, present in (
        (layer.up, batches, now.up if layer.shape.gated else now.down),
        (lambda h, plan, tile: launch_down(h, layer.down, plan, tile), hs, now.down),
    ):
        found = []
        for tile in {present: None, **dict.fromkeys(tried)}:
            calls = [lambda x=x, p=p, t=tile, f=launch: f(x, p, t) for x, p in zip(rows, plans, strict=True)]
            try:
                found.append((graph_us(calls, 3), tile))
            except Exception as error:  # too much shared memory, or too many registers
                print(f"{tile}: {type(error).__name__}", file=sys.stderr)
        best = sorted(found, key=lambda pair: pair[0])[: len(steps) or 3]
        cells.append(f"{found[0][0]:.1f} {short(present)}")
        cells.append(", ".join(f"{us:.1f} {short(tile)}" for us, tile in best))
    return cells


def step(text: str) -> Step:
    """A tile's (outputs, K, warps, stages) from the command line."""
    n, k, warps, stages = (int(part) for part in text.split(","))
    return n, k, warps, stages


def short(tile: Tile) -> str:
    return f"{tile.n}×{tile.k} w{tile.warps} s{tile.stages}{' across' if tile.across else ''}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def report(args: argparse.Namespace) -> Iterator[str]:
    device, shapes = ("cpu", TINY) if args.tiny else ("cuda", SHAPES)
    yield f"{'CPU' if args.tiny else torch.cuda.get_device_name()}, torch {torch.__version__}, bf16"
    for name, shape in shapes.items():
        if args.shapes and name not in args.shapes:
            continue
        layer = Layer(shape, device)
        if "bits" in args.only:
            found = list(bits(layer, 100 if args.tiny else max(BITS)))
            wrong = ", ".join(f"{what}: {count}" for what, count in found if count) or "none"
            yield f"\n{name} bits: rows that differ in {len(found)} comparisons: {wrong}"
        if "speed" in args.only and not args.tiny:
            head = ["tokens", "experts read", "floor µs", "layer", "route", "plan", "up", "down", "combine"]
            yield f"\n{name}\n" + markdown(head, [speed(layer, count) for count in args.tokens])
        if "tune" in args.only and not args.tiny:
            head = ["tokens", "rows", "up now", "best", "down now", "best"]
            yield f"\n{name} tiles\n" + markdown(head, [tune(layer, count, args.tiles) for count in args.tokens])
        del layer
        if not args.tiny:
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=("bits", "speed", "tune"), default=["bits", "speed"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), help="default: all")
    parser.add_argument("--tiles", nargs="+", type=step, default=[], help="tiles to tune: outputs,K,warps,stages")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("benchmarks.experts needs an NVIDIA GPU; --tiny runs a small one on the CPU.")
    lines = []
    for line in report(args):
        print(line, flush=True)
        lines.append(line)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
