"""Products of experts with 4-bit weights on a GPU: the same bits as the Triton kernels? µs by kernel and tile.

    python -m benchmarks.packed_experts [--parts gluon triton bits] [--kinds nvfp4] [--tokens 1 64]

Prints Markdown tables for the experts of 35B-A3B. *bits*: does the comparison of an engine's start hold? *triton*,
*gluon*: µs of gate and up, and of down, beside the time in which the chosen experts' weights are read at 4.68 TB/s.
Each part has a process and a limit of time of its own, so that one that hangs does not take another with it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch

from benchmarks.experts import SHAPES, graph_us
from unisono.kernels.gemm.packed_decoding import NVFP4_GROUP
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.moe import integers, nvfp4
from unisono.kernels.moe.packed_gluon import launch_packed_experts, rows_of
from unisono.kernels.moe.plan import ExpertPlan, plan_experts

SHAPE = SHAPES["35B-A3B"]
KINDS = ("nvfp4", "int4 zeros")
TOKENS = (1, 16, 64, 512, 2048, 8192)
CANDIDATES = {
    16: [
        Tile(16, 64, 128, 8, 6, registers=80),
        Tile(16, 64, 128, 8, 4, registers=64),
        Tile(16, 32, 128, 8, 6, registers=80),
        Tile(16, 32, 128, 8, 6, registers=64),
    ],
    32: [Tile(32, 64, 128, 8, 4, registers=80), Tile(32, 32, 128, 8, 4, registers=80)],
    64: [Tile(64, 64, 128, 8, 3, registers=80), Tile(64, 64, 128, 8, 4, registers=104)],
    128: [
        Tile(128, 128, 128, 12, 4, registers=168),
        Tile(128, 64, 128, 8, 3, registers=128),
        Tile(128, 64, 128, 8, 2, registers=128),
    ],
}
LIMITS = {"gluon": 70, "triton": 40, "bits": 60}
"""Seconds by part. The first two compile in many processes what the last one runs."""


def stack(kind: str, n: int, k: int, experts: int = SHAPE.experts + SHAPE.shared) -> tuple:
    """Operands of a random stack [E, N, K]: weight, scales, zeros or multipliers, group."""
    generator = torch.Generator("cuda").manual_seed(0)
    packed = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=generator, device="cuda")
    if kind == "nvfp4":
        scales = torch.randint(8, 120, (experts, n, k // 16), dtype=torch.uint8, generator=generator, device="cuda")
        return packed, scales, torch.rand(experts, n, generator=generator, device="cuda") * 1e-4, NVFP4_GROUP
    scales = (0.5 + torch.rand(experts, n, k // 128, generator=generator, device="cuda")) * 0.01
    zeros = torch.randint(0, 16, scales.shape, generator=generator, device="cuda").to(torch.int8)
    return packed, scales, zeros, 128


def triton_product(gated: bool, x: torch.Tensor, operands: tuple, plan: ExpertPlan, _: None) -> torch.Tensor:
    if operands[3] == NVFP4_GROUP:
        launch = nvfp4.launch_nvfp4_gate_up if gated else nvfp4.launch_nvfp4_down
        return launch(x, *operands[:3], plan)
    launch = integers.launch_integer_gate_up if gated else integers.launch_integer_down
    return launch(x, *operands, plan)


def gluon_product(gated: bool, x: torch.Tensor, operands: tuple, plan: ExpertPlan, tile: Tile) -> torch.Tensor:
    return launch_packed_experts(x, *operands, plan, gated, tile=tile)


PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {"triton": triton_product, "gluon": gluon_product}


def plans_of(tokens: int) -> list[ExpertPlan]:
    """Plans of batches that choose other experts: together they read more than the L2 holds."""
    found = []
    for seed in range({1: 24, 16: 4}.get(tokens, 2)):
        generator = torch.Generator("cuda").manual_seed(seed)
        chosen = torch.rand(tokens, SHAPE.experts, generator=generator, device="cuda").argsort(1)[:, : SHAPE.top_k]
        ids = chosen.to(torch.int32).contiguous()
        found.append(
            plan_experts(ids, SHAPE.experts, integers.packed_tile_rows(ids.numel(), SHAPE.experts, torch.bfloat16))
        )
    return found


def inputs(tokens: int, gated: bool) -> torch.Tensor:
    rows = tokens if gated else tokens * (SHAPE.top_k + SHAPE.shared)
    return torch.randn(rows, SHAPE.hidden if gated else SHAPE.inner, device="cuda").bfloat16()


def operands_of(kind: str, gated: bool) -> tuple:
    return stack(kind, 2 * SHAPE.inner, SHAPE.hidden) if gated else stack(kind, SHAPE.hidden, SHAPE.inner)


def tiles_of(kernel: str, plan: ExpertPlan) -> list[Tile | None]:
    return [None] if kernel == "triton" else CANDIDATES[rows_of(plan)]


def warm(kernel: str, kind: str, tokens: int, gated: bool) -> str:
    """Compile a product's kernels in this process; the next one finds them in the cache."""
    plan, operands, failed = plans_of(tokens)[0], operands_of(kind, gated), []
    for tile in tiles_of(kernel, plan):
        try:
            PRODUCTS[kernel](gated, inputs(tokens, gated), operands, plan, tile)
            torch.cuda.synchronize()
        except Exception as error:  # a tile that does not fit says so in the tables
            failed.append(f"{kernel} {kind} {tile}: {type(error).__name__} {str(error)[:200]}")
    return "\n".join(failed)


def speed(kernel: str, kinds: list[str], tokens: tuple[int, ...]) -> Iterator[list[object]]:
    for kind, gated in product(kinds, (True, False)):
        operands = operands_of(kind, gated)
        each = sum(t[0].nbytes for t in operands[:3])
        for count in measured(kind, tokens):
            plans, x, times = plans_of(count), inputs(count, gated), []
            for tile in tiles_of(kernel, plans[0]):
                calls = [partial(PRODUCTS[kernel], gated, x, operands, plan, tile) for plan in plans]
                try:
                    times.append(f"{'×'.join(map(str, tile or ()))} {graph_us(calls, 9):.1f}")
                except Exception as error:
                    times.append(f"{tile} {type(error).__name__}")
            read = sum(plan.ids.unique().numel() for plan in plans) / len(plans) + SHAPE.shared
            yield [kind, "gate+up" if gated else "down", count, f"{read * each / 4.68e6:.1f}", *times]


def bits(kinds: list[str]) -> Iterator[list[object]]:
    for kind in kinds:
        exact = nvfp4.exact_nvfp4_experts if kind == "nvfp4" else integers.exact_int4_experts
        stacks = [operands_of(kind, gated)[: 3 if kind == "nvfp4" else 4] for gated in (True, False)]
        try:
            yield [kind, exact.same_bits(*stacks, torch.bfloat16, SHAPE.experts, SHAPE.top_k, True)]
        except Exception as error:
            yield [kind, f"{type(error).__name__} {str(error)[:300]}"]


def measured(kind: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tokens if kind == KINDS[0] else tokens[:3]


def part(name: str, kinds: list[str], tokens: tuple[int, ...]) -> None:
    if name != "bits":
        jobs = [
            (name, kind, count, gated) for kind in kinds for count in measured(kind, tokens) for gated in (True, False)
        ]
        with ProcessPoolExecutor(14, get_context("spawn")) as pool:
            failed = [line for line in pool.map(warm, *zip(*jobs, strict=True)) if line]
        print("\n".join(sorted(failed)), flush=True)
    print(f"**{name}**", flush=True)
    for row in bits(kinds) if name == "bits" else speed(name, kinds, tokens):
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        with torch.inference_mode():
            return part(given.part, given.kinds, tuple(given.tokens))
    for name in given.parts:
        command = [sys.executable, "-m", "benchmarks.packed_experts", "--part", name]
        command += ["--kinds", *given.kinds, "--tokens", *map(str, given.tokens)]
        with subprocess.Popen(command, start_new_session=True) as child:
            try:
                child.wait(LIMITS[name])
            except subprocess.TimeoutExpired:
                print(f"{name}: more than {LIMITS[name]} s", flush=True)
                os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
