"""Kernels of a Gemma 4 round at its real sizes: tiles of products, attention of few rows, and the layer's norms.

    python -m benchmarks.gemma_kernels [--only norms experts tiles attention] [--rows 1 4] [--plans 256x1 128x1]
        [--products "26b o" "26b router"]

*experts*: µs of both products by tile. *tiles*: µs of the Triton product with each blocking beside the one that
``linear_tile`` chooses, weights out of L2. *attention*: µs of a layer of a round by Triton's kernel and by Gluon's,
whichever serves, with cut tiles merged by the last program or by a kernel of its own, and the sides whose bits differ.
*norms*: the fused kernels of ``kernels/moe/beside.py`` beside the ops in turn, and whether the bits are equal. Times
are medians over CUDA graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import triton

from benchmarks.attention import Heads, Paged, by_hopper
from benchmarks.experts import Layer, Shape, graph_us, inputs, short
from benchmarks.kernels import cold, markdown, random
from unisono.kernels import rms_norm
from unisono.kernels.attention import hopper_rounds as attention_hopper_rounds
from unisono.kernels.attention import merge as attention_merge
from unisono.kernels.attention import paged as ops
from unisono.kernels.gemm.linear import launch_linear, linear_tile
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.moe.beside import BesideNormed, beside_norms, beside_sum
from unisono.kernels.moe.combine import combine_experts
from unisono.kernels.moe.experts import expert_gate_up, launch_down, launch_gate_up
from unisono.kernels.norm.sandwich_norm import add_normed

PRODUCTS = {
    "26b qkv": (8192, 2816),
    "26b qkv full": (9216, 2816),
    "26b o": (2816, 4096),
    "26b o full": (2816, 8192),
    "26b gate+up": (4224, 2816),
    "26b down": (2816, 2112),
    "26b router": (128, 2816),
    "assistant q": (4096, 1024),
    "assistant gate+up": (8192, 1024),
    "assistant lm_head": (262144, 1024),
    "lm_head": (262144, 2816),
    "31b o": (5376, 8192),
    "31b down": (5376, 21504),
}  # name: N, K
BLOCKS = (
    (16, 256, 2), (16, 512, 2), (16, 512, 4), (16, 1024, 4), (32, 128, 4), (32, 256, 4), (32, 512, 4), (64, 128, 4),
    (64, 256, 4), (128, 128, 4),
)  # fmt: skip
"""(outputs, inputs, warps) of a step; as many stages as fit."""

HEADS = {
    "sliding": Heads("sliding", 16, 8, 256, 1024),
    "Qwen3.5-9B": Heads("Qwen3.5-9B", 16, 4, 256),
    "full": Heads("full", 16, 2, 512),
}


def candidates(rows: int, n: int, k: int) -> list[Tile]:
    """The tile in use, then others."""
    m = max(16, triton.next_power_of_2(rows))
    found = [linear_tile(rows, n, torch.bfloat16)]
    for outputs, step, warps in BLOCKS:
        stages = min(6, 200 * 1024 // (2 * (m + outputs) * step))
        if step < 2 * k and stages >= 2:
            found += [Tile(m, outputs, step, warps, stages)]
    return found


def tiles(rows: tuple[int, ...], products: dict[str, tuple[int, int]]) -> None:
    table = []
    for name, (n, k) in products.items():
        for m in rows:
            weight, x = random(n, k, scale=k**-0.5), random(m, k)
            found: list[tuple[float, Tile]] = []
            for tile in candidates(m, n, k):
                try:
                    us = cold(lambda w, x=x, tile=tile: launch_linear(x, w, None, None, tile), weight)
                except triton.runtime.errors.OutOfResources:
                    continue
                found.append((us, tile))
            now, *others = found
            best = sorted(others, key=lambda pair: pair[0])[:3]
            cells = [f"{us:.1f}: {t.n}×{t.k}, {t.warps} w, {t.stages} s" for us, t in (now, *best)]
            table.append([f"{name} {n}×{k}", str(m), f"{2 * n * k / 4.68e6:.1f}", *cells])
    print(markdown(["product", "M", "floor", "now", "best", "second", "third"], table), flush=True)


def compile_tiles(rows: tuple[int, ...], products: dict[str, tuple[int, int]]) -> None:
    """Compile what ``tiles`` launches, several at a time."""
    wanted = {}
    for n, k in products.values():
        for m in rows:
            for tile in candidates(m, n, k):
                wanted.setdefault((tile, k % tile.k == 0, m == 1), (m, n, k, tile))

    def compiled(case: tuple[int, int, int, Tile]) -> None:
        m, n, k, tile = case
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            launch_linear(random(m, k), random(min(n, 256), k), None, None, tile)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(compiled, wanted.values()))
    torch.cuda.synchronize()


LENGTHS = ((1, 1100), (1, 8200), (16, 1100), (64, 1100))
"""(requests, keys) of rounds."""

Plans = list[tuple[int, int]]
SIDES = {"Triton": (False, False), "Triton, merge": (False, True), "Gluon": (True, False), "Gluon, merge": (True, True)}
"""(the kernel is Gluon's, a kernel of its own merges cut tiles), whatever serves."""


def attention(rows: tuple[int, ...], plans: Plans) -> None:
    """Time each side on rounds, and name the sides whose bits are not those of the first."""
    head = ["layer", "requests", "keys", "tokens", "plan", "floor", *SIDES, "other bits"]
    for heads in HEADS.values():
        compile_attention(heads, rows, plans)
        table = []
        for (count, length), width in itertools.product(LENGTHS, rows):
            layers = 12 if count == 1 else 4  # more than the L2 holds
            paged, q = Paged([length] * count, layers, heads), heads.queries(width * count)
            read = count * min(length, heads.window or length) * heads.token_bytes / 4.68e6
            for plan in plans:
                paged.backend.programs_per_processor = plan[1]
                with split_by(plan[0]):
                    cells = sides(paged, q, width)
                size = f"{plan[0]}×{plan[1]}"
                table.append([heads.name, str(count), str(length), str(width), size, f"{read:.1f}", *cells])
        print(markdown(head, table), "\n", flush=True)


@contextlib.contextmanager
def split_by(keys: int) -> Iterator[None]:
    """Give splits this many keys (other bits, the same on every side); let Gluon's kernel take any number of tiles."""
    with contextlib.ExitStack() as stack:
        for module in (ops, attention_hopper_rounds, attention_merge):
            stack.enter_context(mock.patch.object(module, "SPLIT", keys))
        stack.enter_context(mock.patch.object(attention_hopper_rounds, "SHARED_TILES", 10**6))
        yield


def sides(paged: Paged, q: torch.Tensor, width: int) -> list[str]:
    """µs of a layer by each side, and the sides with other bits."""
    heads, cells, seen = paged.heads, [], {}
    inputs = paged.round_inputs(paged.rows, paged.kv_len, width)
    paged.backend.plan(inputs, heads.window)
    where, how = (paged.table, inputs.positions, *inputs.plan), (paged.scale, heads.window)
    for name, (gluon, apart) in SIDES.items():
        by_hopper(heads, gluon)

        def run(layer: int, apart: bool = apart) -> torch.Tensor:
            return ops.launch_attention(q, *paged.caches[layer][:2], *where, *how, separate_merge=apart)

        try:
            seen[name] = run(0)
            cells.append(f"{graph_us([functools.partial(run, layer) for layer in range(paged.layers)]):.1f}")
        except triton.runtime.errors.OutOfResources:
            cells.append("–")
    others = [name for name, out in seen.items() if not torch.equal(out, seen["Triton"])]
    return [*cells, ", ".join(others) or "none"]


def compile_attention(heads: Heads, rows: tuple[int, ...], plans: Plans) -> None:
    """Compile what ``attention`` launches, several at a time."""

    def compiled(case: tuple[int, bool]) -> None:
        width, apart = case
        paged, q = Paged([300], 1, heads), heads.queries(width)
        inputs = paged.round_inputs(paged.rows, paged.kv_len, width)
        paged.backend.plan(inputs, heads.window)
        where, how = (paged.table, inputs.positions, *inputs.plan), (paged.scale, heads.window)
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            ops.launch_attention(q, *paged.caches[0][:2], *where, *how, separate_merge=apart)

    for keys, gluon in itertools.product(dict.fromkeys(keys for keys, _ in plans), (True, False)):
        by_hopper(heads, gluon)
        with split_by(keys), ThreadPoolExecutor(8) as pool:
            list(pool.map(compiled, itertools.product(rows, (False, True))))
    torch.cuda.synchronize()


UPS = ((32, 128, 4, 4), (32, 128, 4, 3), (64, 128, 4, 3), (64, 128, 4, 4), (32, 256, 4, 3), (16, 256, 4, 4))
DOWNS = ((64, 256, 4, 2), (64, 128, 4, 4), (128, 128, 4, 3), (32, 256, 4, 3), (32, 128, 4, 4))
"""(n, k, warps, stages) of experts' products; the first are those in use at few pairs."""


def experts(rows: tuple[int, ...]) -> None:
    layer, table = Layer(Shape(2816, 128, 704, 8, 0), "cuda"), []
    for count in rows:
        batches = inputs(layer, count)
        plans = [layer.plan(layer.route(x)[0]) for x in batches]
        hs = [expert_gate_up(x, layer.gate_up, plan) for x, plan in zip(batches, plans, strict=True)]
        for name, launch, given, weight, blocks in (
            ("gate+up", launch_gate_up, batches, layer.gate_up, UPS),
            ("down", launch_down, hs, layer.down, DOWNS),
        ):
            found = []
            for block in blocks:
                tile, both = Tile(16, *block, across=True), zip(given, plans, strict=True)
                calls = [lambda x=x, p=p, t=tile, f=launch, w=weight: f(x, w, p, t) for x, p in both]
                try:
                    found.append(f"{graph_us(calls, 5):.1f} {short(tile)}")
                except triton.runtime.errors.OutOfResources:
                    found.append("–")
            table.append([name, str(count), *found, *["–"] * (len(UPS) - len(found))])
    print(markdown(["product", "tokens", "now", *["other"] * (len(UPS) - 1)], table), flush=True)


def norms_of(made: BesideNormed) -> list[torch.Tensor]:
    return [made.total, made.dense, made.sparse, made.routed]


def norms(rows: tuple[int, ...]) -> None:
    h, top_k, eps, table = 2816, 8, 1e-6, []
    w = [torch.randn(h, device="cuda") for _ in range(7)]
    factor = random(1)

    def before(x: torch.Tensor, r: torch.Tensor) -> list[torch.Tensor]:
        total, _ = add_normed(x, r, w[0], eps, None, None, 0.0)
        return [total, *(rms_norm(total, weight, eps) for weight in w[1:4])]

    def after(y: torch.Tensor, weights: torch.Tensor, dense: torch.Tensor, r: torch.Tensor) -> list[torch.Tensor]:
        mixed = combine_experts(y, weights, None, None, torch.zeros_like(r))
        both, _ = add_normed(mixed, rms_norm(dense, w[4], eps), w[5], eps, None, None, 0.0)
        return list(add_normed(both, r, w[6], eps, factor, w[0], eps))

    for m in (*rows, 64):
        x, r, dense, y = random(m, h), random(m, h), random(m, h), random(m * top_k, h)
        weights = torch.rand(m, top_k, device="cuda")
        pairs: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (
                "norms",
                lambda x=x, r=r: before(x, r),
                lambda x=x, r=r: norms_of(beside_norms(x, r, w[0], eps, *w[1:4], eps)),
            ),
            (
                "sum",
                lambda y=y, weights=weights, dense=dense, r=r: after(y, weights, dense, r),
                lambda y=y, weights=weights, dense=dense, r=r: beside_sum(
                    y, weights, dense, r, w[4], w[5], eps, w[6], eps, factor, w[0], eps
                )[:2],
            ),
        ]
        for name, apart, fused in pairs:
            same = all(torch.equal(a, b) for a, b in zip(apart(), fused(), strict=True))  # type: ignore[call-overload]
            table.append([name, str(m), f"{graph_us([apart] * 20):.1f}", f"{graph_us([fused] * 20):.1f}", str(same)])
    print(markdown(["kernel", "M", "ops in turn", "fused", "equal bits"], table), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["norms", "experts", "attention", "tiles"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--plans", nargs="+", default=["256x1"], help="of attention: keys of a split x programs for each processor"
    )
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS), help="of tiles")
    args = parser.parse_args()
    rows = tuple(args.rows)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16\n")
    if "norms" in args.only:
        norms(rows)
    if "experts" in args.only:
        experts(rows)
    if "tiles" in args.only:
        products = {name: PRODUCTS[name] for name in args.products}
        compile_tiles(rows, products)
        tiles(rows, products)
    if "attention" in args.only:
        attention(rows, [(int(keys), int(programs)) for keys, programs in (plan.split("x") for plan in args.plans)])


if __name__ == "__main__":
    main()
