"""Products of fp8 experts in rounds on a GPU: µs by tile beside the time of their bytes.

    python -m benchmarks.fp8_experts [--tokens 1 64] [--processes 14]

Prints Markdown tables for the experts of 35B-A3B with scales by block: µs of gate and up, of the quantisation between
both products, and of down, and the time in which the chosen experts' weights are read at 4.68 TB/s. All tiles have the
same bits. The first figure of a line is that of the tile that is served.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from unittest import mock

import torch

from benchmarks.experts import SHAPES, graph_us
from benchmarks.packed_experts import SHAPE, inputs
from unisono.kernels.gemm.fp8_quantize import GROUP, Quantised, launch_quantize
from unisono.kernels.gemm.tile import ExpertTiles, Tile
from unisono.kernels.moe import fp8
from unisono.kernels.moe.plan import ExpertPlan, plan_experts

assert SHAPE is SHAPES["35B-A3B"]
TOKENS = (1, 4, 16, 64)
UP = [Tile(16, n, 128, 4, stages, across=True) for n, stages in ((64, 6), (64, 4), (128, 3), (128, 2))]
DOWN = [Tile(16, n, 128, 4, stages, across=True) for n, stages in ((64, 3), (128, 2), (128, 3), (64, 2), (128, 4))]


def stack(gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Random (weight e4m3 [E, N, K], scales [E, N / 128, K / 128])."""
    n, k = (2 * SHAPE.inner, SHAPE.hidden) if gated else (SHAPE.hidden, SHAPE.inner)
    generator = torch.Generator("cuda").manual_seed(0)
    held = torch.randint(
        0, 120, (SHAPE.experts + SHAPE.shared, n, k), dtype=torch.uint8, generator=generator, device="cuda"
    )
    scales = torch.rand(len(held), n // 128, k // 128, generator=generator, device="cuda") * 1e-3
    return held.view(torch.float8_e4m3fn), scales


def plans_of(tokens: int) -> list[ExpertPlan]:
    """Plans of batches that choose other experts: together they read more than the L2 holds."""
    found = []
    for seed in range({1: 24, 4: 8, 16: 4}.get(tokens, 2)):
        generator = torch.Generator("cuda").manual_seed(seed)
        chosen = torch.rand(tokens, SHAPE.experts, generator=generator, device="cuda").argsort(1)[:, : SHAPE.top_k]
        ids = chosen.to(torch.int32).contiguous()
        found.append(plan_experts(ids, SHAPE.experts, fp8.fp8_tile_rows(ids.numel(), SHAPE.experts)))
    return found


def quantised(tokens: int, gated: bool) -> Quantised:
    x = inputs(tokens, gated)
    return Quantised(*launch_quantize(x, GROUP), GROUP, len(x), x.dtype)


def run(
    gated: bool, x: Quantised, operands: tuple[torch.Tensor, torch.Tensor], plan: ExpertPlan, tile: Tile | None
) -> torch.Tensor:
    """Launch a product in a tile; None: in the one that is served."""
    with mock.patch.object(fp8, "_tiles_of", (lambda *_: ExpertTiles(tile, tile)) if tile else fp8._tiles_of):
        return (fp8.launch_fp8_gate_up if gated else fp8.launch_fp8_down)(x, *operands, plan)


def warm(tokens: int, gated: bool, tile: Tile) -> str:
    """Compile a kernel in this process; the next one finds it in the cache."""
    try:
        run(gated, quantised(tokens, gated), stack(gated), plans_of(tokens)[0], tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{tokens} {gated} {tile}: {type(error).__name__} {str(error)[:200]}"
    return ""


def measured(tokens: tuple[int, ...]) -> Iterator[list[object]]:
    """Lines of the table."""
    for gated in (True, False):
        operands, tiles = stack(gated), (None, *(UP if gated else DOWN))
        for count in tokens:
            plans, x, times = plans_of(count), quantised(count, gated), list[str]()
            for tile in tiles:
                calls: list[Callable[[], object]] = [partial(run, gated, x, operands, plan, tile) for plan in plans]
                try:
                    us = f"{graph_us(calls, 15):.1f}"
                except Exception as error:
                    us = type(error).__name__
                times.append(f"{tile.n} s{tile.stages}: {us}" if tile else us)
            read = sum(plan.ids.unique().numel() for plan in plans) / len(plans) + SHAPE.shared
            floor = read * (operands[0][0].nbytes + operands[1][0].nbytes) / 4.68e6
            yield ["gate+up" if gated else "down", count, f"{read:.0f}", f"{floor:.1f}", *times]
    for count in tokens:
        h = inputs(count, False)
        yield ["quantise", count, "", "", f"{graph_us([partial(launch_quantize, h, GROUP)] * 20, 15):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--processes", type=int, default=14)
    chosen = parser.parse_args()
    jobs = [(*pair, tile) for pair in product(chosen.tokens, (True, False)) for tile in (UP if pair[1] else DOWN)]
    with ProcessPoolExecutor(chosen.processes, get_context("spawn")) as pool:
        print("\n".join(filter(None, pool.map(warm, *zip(*jobs, strict=True)))), flush=True)
    print("| product | tokens | experts read | µs of their bytes | µs by outputs and stages of a tile |")
    with torch.inference_mode():
        for row in measured(tuple(chosen.tokens)):
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
