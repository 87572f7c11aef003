"""Quantised linear layers and experts on a GPU: the same bits at every number of rows? How long do they take?

    python -m benchmarks.quantised [--only bits speed tune experts] [--rows 1 64] [--tiny] [--out FILE.md]

Prints Markdown tables of the four shapes of an 8B model. *bits*: whether torch's product (fp8) or the plain one (int4)
was proven, rows of a batch of 4096 whose bits differ when computed in another number of rows or by the other kernel
(every number should be 0), and the error against float64 of the same quantised operands. *speed*: µs over replays of a
CUDA graph that walks through several copies of the weight, beside the plain bf16 layer; in brackets the floor: bytes at
4.68 TB/s, or operations at 1300 (fp8) and 770 (others) TFLOP/s. *tune*: µs by tile, for the tables of
``unisono/kernels/gemm/fp8.py`` and ``int4.py``. *experts*: both products of a layer of 35B-A3B's experts. ``--tiny``:
small sizes on the CPU's twins, without times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.experts import differing, graph_us
from unisono.kernels import configure_exact_blas, exact_blas, linear
from unisono.kernels.gemm.fp8 import _scaled_mm, fp8_linear, launch_fp8_product, prove_fp8, widened_weight
from unisono.kernels.gemm.fp8_quantize import E4M3, launch_quantize, quantize_cpu, widened_activations
from unisono.kernels.gemm.int4 import int4_linear, launch_int4_linear, prove_int4, unpack_cpu
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.moe.experts import exact_experts, expert_down, expert_gate_up, expert_tile
from unisono.kernels.moe.fp8 import exact_fp8_experts, expert_fp8_down, expert_fp8_gate_up, fp8_expert_tile
from unisono.kernels.moe.integers import expert_integer_down, expert_integer_gate_up, packed_tile_rows
from unisono.kernels.moe.plan import plan_experts

BYTES_PER_US, FP8_FLOPS_PER_US, FLOPS_PER_US = 4.68e6, 1.3e9, 7.7e8
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (24576, 4096), "down": (4096, 12288)}
TINY = {"tiny": (200, 256)}
ROWS = (1, 16, 64, 2048, 8192)
BITS = (1, 2, 3, 4, 8, 16, 17, 32, 33, 64, 65, 100, 128, 257, 512, 1000, 2048)
KINDS = ("fp8 by block", "fp8 by output", "int4")
GROUP = 128


@dataclass(frozen=True)
class Weight:
    """One random weight [N, K] of a kind, and its product."""

    kind: str
    operands: tuple

    @staticmethod
    def random(kind: str, n: int, k: int, device: str, seed: int = 0) -> Weight:
        generator = torch.Generator(device).manual_seed(seed)

        def rand(*size: int) -> torch.Tensor:
            return torch.rand(size, generator=generator, device=device)

        if kind == "int4":
            packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator, device=device)
            return Weight(kind, (packed, (0.5 + rand(n, k // GROUP)) * 0.01, None, GROUP))
        weight = torch.randn(n, k, generator=generator, device=device) * 100
        scales = rand(-(-n // 128), -(-k // 128)) if kind == "fp8 by block" else rand(n)
        return Weight(kind, (weight.clamp(-448, 448).to(E4M3), (0.5 + scales) * 1e-4))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return int4_linear(x, *self.operands) if self.kind == "int4" else fp8_linear(x, *self.operands)

    def prove(self) -> bool:
        return (prove_int4 if self.kind == "int4" else prove_fp8)(*self.operands, torch.bfloat16)

    def triton(self, x: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
        """By the Triton kernel at any number of rows."""
        if self.kind == "int4":
            return launch_int4_linear(x, *self.operands, None, None, tile)
        x8, scales = launch_quantize(x, GROUP if self.kind == "fp8 by block" else None)
        return launch_fp8_product(x8, scales, *self.operands, None, None, len(x), x.dtype, tile)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """What is multiplied with the weight, in float64: x, or what its quantised values stand for."""
        if self.kind == "int4":
            return x.double()
        group = GROUP if self.kind == "fp8 by block" else None
        x8, scales = (launch_quantize if x.is_cuda else quantize_cpu)(x, group)
        return widened_activations(x8[: len(x)], scales[:, : len(x)]).double()

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.operands if isinstance(t, torch.Tensor))

    def double(self) -> torch.Tensor:
        """The weight in float64."""
        if self.kind == "int4":
            return unpack_cpu(*self.operands, torch.bfloat16).double()
        return widened_weight(*self.operands).double()


def batch(rows: int, k: int, device: str) -> torch.Tensor:
    """Rows of different magnitudes."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(rows, k, generator=generator, device=device)
    return (x * torch.exp(torch.randn(rows, 1, generator=generator, device=device))).bfloat16()


def bits(name: str, n: int, k: int, device: str) -> Iterator[list[object]]:
    """[layer, kind, proven, rows that differ of Triton's tiles, of torch's product, of the op; error]."""
    most = 4096 if device == "cuda" else 40
    x = batch(most, k, device)
    for kind in KINDS:
        weight = Weight.random(kind, n, k, device)
        proven = weight.prove()
        rows = [count for count in BITS if count <= most]
        want = weight.triton(x) if device == "cuda" else weight(x)
        tiles = sum(differing(weight.triton(x[:m]), want[:m]) for m in rows) if device == "cuda" else "-"
        op = sum(differing(weight(x[:m]), want[:m]) for m in (*rows, most))
        exact = weight.values(x[:32]) @ weight.double().t()
        error = float((want[:32].double() - exact).norm() / exact.norm())
        yield [name, kind, proven, tiles, against_torch(weight, x, want), op, f"{error:.1e}"]


def against_torch(weight: Weight, x: torch.Tensor, want: torch.Tensor) -> str:
    """Rows that differ from those of torch's fp8 product, by number of rows; or why there is none."""
    if weight.kind == "int4" or not x.is_cuda:
        return "-"
    found = []
    for m in (4, 16, 68, 512, 4096):
        x8, scales = launch_quantize(x[:m], GROUP if weight.kind == "fp8 by block" else None)
        try:
            found.append(f"{m}: {differing(_scaled_mm(x8, scales, *weight.operands, torch.bfloat16), want[:m])}")
        except Exception as error:  # no such product for these sizes, or in this torch
            found.append(f"{m}: {str(error).strip().splitlines()[0][:100]}")
    return ", ".join(found)


def copies(nbytes: int) -> int:
    """Weights that together do not fit the L2."""
    return max(2, -(-240_000_000 // nbytes))


def microseconds(weights: list, run: Callable) -> float:
    return graph_us([partial(run, weight) for weight in weights])


def speed(name: str, n: int, k: int, rows: tuple[int, ...]) -> Iterator[list[object]]:
    """[layer, rows, for each kind µs of the layer and its floor, µs of a bf16 layer]."""
    weights = {}
    for kind in KINDS:
        count = copies(Weight.random(kind, n, k, "cuda").bytes)
        weights[kind] = [Weight.random(kind, n, k, "cuda", seed) for seed in range(count)]
        weights[kind][0].prove()
    plain = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies(2 * n * k))]
    exact_blas.prove(plain[0])
    for m in rows:
        x, line = batch(m, k, "cuda"), [name, m]
        for kind in KINDS:
            some = weights[kind] if m <= 64 else weights[kind][:2]
            rate = FLOPS_PER_US if kind == "int4" else FP8_FLOPS_PER_US
            floor = max((some[0].bytes + 2 * m * (n + k)) / BYTES_PER_US, 2 * m * n * k / rate)
            line.append(f"{microseconds(some, lambda weight, x=x: weight(x)):.1f} ({floor:.1f})")
        x8, x_scales = launch_quantize(x, GROUP)
        own = microseconds([x] * 8, lambda x: launch_quantize(x, GROUP))
        product = microseconds(
            weights["fp8 by block"][: None if m <= 64 else 2],
            lambda weight, x8=x8, s=x_scales, m=m: product_of(weight, x8, s, m),
        )
        some = plain if m <= 64 else plain[:2]
        yield [*line, f"{own:.1f} + {product:.1f}", f"{microseconds(some, lambda w, x=x: linear(x, w)):.1f}"]


def product_of(weight: Weight, x8: torch.Tensor, x_scales: torch.Tensor, rows: int) -> torch.Tensor:
    """The fp8 product alone, as the op chooses it."""
    if rows <= 64 or not weight.prove():
        return launch_fp8_product(x8, x_scales, *weight.operands, None, None, rows, torch.bfloat16)
    return _scaled_mm(x8, x_scales, *weight.operands, torch.bfloat16)


FP8_TILES = {
    16: [
        *(Tile(16, n, 128, *rest, ahead=True) for n, *rest in ((64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 3))),
        Tile(16, 64, 128, 4, 8),
    ],
    64: [
        *(Tile(64, n, 128, 4, stages, ahead=True) for n, stages in ((64, 2), (64, 3), (128, 2))),
        Tile(64, 64, 128, 4, 6),
        Tile(32, 64, 128, 4, 3, ahead=True),
    ],
}
INT4_TILES = {
    16: [
        Tile(16, n, 0, warps, stages)
        for n, warps, stages in ((16, 2, 4), (32, 2, 4), (32, 4, 4), (32, 4, 6), (64, 4, 4))
    ],
    64: [Tile(64, n, 0, warps, 3) for n, warps in ((32, 4), (64, 4), (64, 8), (128, 8))],
}


def tune(name: str, n: int, k: int) -> Iterator[list[object]]:
    """[layer, kind, rows, µs of each tile]."""
    for kind, tables in (("fp8 by block", FP8_TILES), ("int4", INT4_TILES)):
        weights = [Weight.random(kind, n, k, "cuda", s) for s in range(copies(Weight.random(kind, n, k, "cuda").bytes))]
        for m, tiles in tables.items():
            x = batch(m, k, "cuda")
            times = []
            for tile in tiles:
                try:
                    us = microseconds(weights, lambda weight, x=x, tile=tile: weight.triton(x, tile))
                    times.append(f"{'×'.join(map(str, vars(tile).values()))} {us:.1f}")
                except Exception as error:  # a tile that does not fit says so
                    times.append(f"{'×'.join(map(str, vars(tile).values()))} {type(error).__name__}")
            yield [name, kind, m, ", ".join(times)]


def expert_layers(device: str, sizes: tuple[int, int, int, int], top_k: int) -> dict[str, tuple[Callable, Callable]]:
    """By kind: (rows of a plan's tile for this number of pairs, both products). sizes: H, I, E, shared experts."""
    hidden, inner, experts, rides = sizes
    stack = experts + rides
    fp8 = [
        Weight.random("fp8 by block", stack * n, k, device).operands for n, k in ((2 * inner, hidden), (hidden, inner))
    ]
    int4 = [Weight.random("int4", stack * n, k, device).operands for n, k in ((2 * inner, hidden), (hidden, inner))]
    plain = [torch.randn(stack, n, k, device=device).bfloat16() / 50 for n, k in ((2 * inner, hidden), (hidden, inner))]
    up8, down8 = ((w.view(stack, -1, w.shape[1]), s.view(stack, -1, s.shape[1])) for w, s in fp8)
    if device == "cuda":  # prompts then run on the kernels that are proven, as when an engine has started
        exact_experts.prove(*plain, experts, top_k)
        exact_fp8_experts.prove(up8, down8, torch.bfloat16, experts, top_k)
    up4, down4 = ((w.view(stack, -1, w.shape[1]), s.view(stack, -1, s.shape[1]), None, GROUP) for w, s, *_ in int4)
    return {
        "bf16": (
            lambda pairs: expert_tile(pairs, experts, plain[0]),
            lambda x, plan: expert_down(expert_gate_up(x, plain[0], plan), plain[1], plan),
        ),
        "fp8": (
            lambda pairs: fp8_expert_tile(pairs, experts, up8, torch.bfloat16),
            lambda x, plan: expert_fp8_down(expert_fp8_gate_up(x, *up8, plan), *down8, plan),
        ),
        "int4": (
            lambda pairs: packed_tile_rows(pairs, experts, torch.bfloat16),
            lambda x, plan: expert_integer_down(expert_integer_gate_up(x, *up4, plan), *down4, plan),
        ),
    }


def experts(device: str) -> Iterator[list[object]]:
    """[kind, rows that differ, µs of both products by number of tokens]."""
    sizes, top_k = ((2048, 512, 256, 1), 8) if device == "cuda" else ((128, 128, 6, 1), 2)
    most = 4096 if device == "cuda" else 20
    x = batch(most, sizes[0], device)
    generator = torch.Generator(device).manual_seed(2)
    ids = torch.rand(most, sizes[2], generator=generator, device=device).topk(top_k).indices.int()
    for kind, (tile, run) in expert_layers(device, sizes, top_k).items():

        def layer(m: int, first: int = 0, tile=tile, run=run) -> torch.Tensor:
            chosen = ids[first : first + m].contiguous()
            return run(x[first : first + m], plan_experts(chosen, sizes[2], tile(chosen.numel())))

        want, differ = layer(most), 0
        for m in (1, 3, 16, 17, 64, 200, 1025):
            if m < most:
                got = layer(m)
                differ += differing(got[: m * top_k], want[: m * top_k])
                differ += differing(got[m * top_k :], want[most * top_k :][:m])
        times: list[object] = ["-"] * 5
        if device == "cuda":
            some = {
                m: [partial(layer, m, m * i) for i in range({1: 24, 16: 8, 64: 4}.get(m, 1))] for m in (1, 16, 64, 512)
            }
            times = [f"{graph_us(calls):.1f}" for calls in some.values()] + [f"{graph_us([partial(layer, most)]):.1f}"]
        yield [kind, differ, *times]


def table(title: str, columns: list[str], rows: Iterator[list[object]]) -> Iterator[str]:
    yield f"\n**{title}**\n"
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=("bits", "speed", "tune", "experts"), default=["bits", "speed", "experts"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, shapes = ("cpu", TINY) if given.tiny else ("cuda", SHAPES)
    titles = {
        "bits": (
            ["layer", "weight", "proven", "Triton's tiles", "torch's", "the op", "error"],
            partial(bits, device=device),
        ),
        "speed": (["layer", "rows", *KINDS, "fp8: quantise + product", "bf16"], partial(speed, rows=tuple(given.rows))),
        "tune": (["layer", "weight", "rows", "µs by tile"], tune),
    }
    lines = []
    configure_exact_blas()
    with torch.inference_mode():
        for section in given.only:
            if section == "experts":
                columns = ["weights", "rows that differ", *(f"{m} tokens, µs" for m in (1, 16, 64, 512, 4096))]
                parts = table("experts", columns, experts(device))
            elif given.tiny and section != "bits":
                continue
            else:
                columns, run = titles[section]
                parts = table(section, columns, (row for name, (n, k) in shapes.items() for row in run(name, n, k)))
            for line in parts:
                print(line, flush=True)
                lines.append(line)
    if given.out:
        given.out.write_text("\n".join([f"`python -m benchmarks.quantised {' '.join(sys.argv[1:])}`", *lines, ""]))


if __name__ == "__main__":
    main()
