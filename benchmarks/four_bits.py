"""Products of few rows with 4-bit weights on a GPU: the same bits as the plain product? µs by kernel and tile.

    python -m benchmarks.four_bits [--kernels gluon triton] [--kinds nvfp4]

Prints Markdown tables. *bits*: rows that differ, at 1, 16, 33 and 64 rows. *speed*: µs by tile beside the time in which
the weight is read at 4.68 TB/s. Each kernel has a process and a limit of time of its own, so that one that hangs does
not take the other with it.
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
from multiprocessing import get_context

import torch

from benchmarks.experts import graph_us
from unisono.kernels.gemm import int4, nvfp4, packed_gluon
from unisono.kernels.gemm.linear import launch_linear
from unisono.kernels.gemm.tile import Tile

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (24576, 4096), "down": (4096, 12288)}
KINDS = ("int4", "int4 zeros", "nvfp4")
ROWS = (1, 16, 33, 64)
TRITON = {
    16: [Tile(16, 64, 0, 4, stages) for stages in (4, 6)],
    64: [Tile(64, 64, 0, 4, stages) for stages in (3, 4)],
}
GLUON = {
    16: [
        None,
        Tile(16, 64, 128, 4, 6, registers=80),
        Tile(16, 64, 128, 8, 8, registers=104),
        Tile(16, 32, 128, 4, 8, registers=80),
        Tile(16, 32, 128, 8, 8, registers=104),
    ],
    64: [
        None,
        Tile(64, 64, 128, 4, 3, registers=80),
        Tile(64, 64, 128, 8, 6, registers=128),
        Tile(64, 32, 128, 4, 5, registers=104),
    ],
}
LIMITS = {"gluon": 60, "triton": 60}


def weight(kind: str, n: int, k: int, seed: int = 0) -> tuple:
    """Operands of a random weight [N, K]: of int4 those of ``unpack_cpu``, of NVFP4 those of ``nvfp4_decode``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator, device="cuda")
    if kind == "nvfp4":
        scales = torch.randint(8, 120, (n, k // 16), dtype=torch.uint8, generator=generator, device="cuda")
        return packed, scales, torch.rand(n, generator=generator, device="cuda") * 1e-4
    scales = (0.5 + torch.rand(n, k // 128, generator=generator, device="cuda")) * 0.01
    zeros = torch.randint(0, 16, (n, k // 128), generator=generator, device="cuda").to(torch.int8)
    return packed, scales, zeros if kind == "int4 zeros" else None, 128


def product(kernel: str, kind: str) -> Callable:
    """The product f(x, *operands, bias, residual, tile) of a kernel."""
    if kernel != "triton":
        group = () if kind != "nvfp4" else (packed_gluon.NVFP4_GROUP,)
        return lambda x, *rest: packed_gluon.launch_packed_rows(x, *rest[:-3], *group, *rest[-3:])
    return nvfp4.launch_nvfp4_linear if kind == "nvfp4" else int4.launch_int4_linear


def tiles(kernel: str, rows: int) -> list[Tile | None]:
    return {"triton": TRITON, "gluon": GLUON}[kernel][16 if rows <= 16 else 64]


def warm(kernel: str, kind: str, tile: Tile | None, rows: int) -> str:
    """Compile one kernel in this process; the next one finds it in the cache."""
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    try:
        product(kernel, kind)(x, *weight(kind, 256, 4096), None, None, tile)
        torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit says so in the tables
        return f"{kernel} {kind} {tile}: {type(error).__name__} {str(error)[:200]}"
    return ""


def bits(kernel: str, kinds: list[str]) -> Iterator[list[object]]:
    for kind in kinds:
        for name, (n, k) in SHAPES.items():
            operands = weight(kind, n, k)
            decode = nvfp4.launch_nvfp4_decode if kind == "nvfp4" else int4.launch_unpack
            plain, found = decode(*operands, torch.bfloat16), []
            for rows in ROWS:
                x = torch.randn(rows, k, device="cuda").bfloat16()
                want = launch_linear(x, plain, None, None)
                for tile in tiles(kernel, rows)[:1]:
                    try:
                        got = product(kernel, kind)(x, *operands, None, None, tile)
                        found.append(int((got != want).any(1).sum()))
                    except Exception as error:
                        found.append(f"{type(error).__name__} {str(error)[:200]}")
            yield [kind, name, *found]


def speed(kernel: str, kinds: list[str]) -> Iterator[list[object]]:
    for kind in (each for each in kinds if each in KINDS[1:]):
        for name, (n, k) in SHAPES.items():
            count = max(2, -(-150_000_000 // (n * k // 2)))
            weights = [weight(kind, n, k, seed) for seed in range(count)]
            for rows in (1, 16, 64):
                x, times = torch.randn(rows, k, device="cuda").bfloat16(), []
                for tile in tiles(kernel, rows):
                    try:
                        run = product(kernel, kind)
                        calls = [partial(run, x, *operands, None, None, tile) for operands in weights]
                        times.append(f"{'×'.join(map(str, tile or ()))} {graph_us(calls, 9):.1f}")
                    except Exception as error:
                        times.append(f"{tile} {type(error).__name__}")
                floor = sum(t.nbytes for t in weights[0] if isinstance(t, torch.Tensor)) / 4.68e6
                yield [kind, name, rows, f"{floor:.1f}", *times]


def part(kernel: str, kinds: list[str]) -> None:
    jobs = [
        (kernel, kind, tile, rows) for rows in (1, 16, 33, 64) for kind in kinds
        for tile in tiles(kernel, rows)[: 1 if kind == "int4" or rows == 33 else None]
    ]  # fmt: skip
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        failed = [line for line in pool.map(warm, *zip(*jobs, strict=True)) if line]
    print("\n".join(sorted(failed)), flush=True)
    for title, rows in (("bits", bits(kernel, kinds)), ("speed", speed(kernel, kinds))):
        print(f"**{kernel}: {title}**", flush=True)
        for row in rows:
            print(f"| {' | '.join(map(str, row))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--part")
    given = parser.parse_args()
    if given.part:
        with torch.inference_mode():
            return part(given.part, given.kinds)
    for kernel in given.kernels:
        command = [sys.executable, "-m", "benchmarks.four_bits", "--part", kernel, "--kinds", *given.kinds]
        with subprocess.Popen(command, start_new_session=True) as child:
            try:
                child.wait(LIMITS[kernel])
            except subprocess.TimeoutExpired:
                print(f"{kernel}: more than {LIMITS[kernel]} s", flush=True)
                os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
