"""Layer kernels on a GPU: are the bits the same at every M, how fast are they, which tile is best?

    python -m benchmarks.kernels [--only bits speed tune] [--rows 1 24 …] [--ranks N] [--out FILE.md]

Prints Markdown tables. *bits*: rows of a batch of 2048 that differ when computed in a batch of M, by the op and by
cuBLASLt; every number should be 0. *speed*: µs and GB/s of each op. *tune*: the best tiles for ``linear._config``.
Times are medians over replays of one CUDA graph that walks through enough weight copies to miss the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton

from benchmarks.experts import graph_us
from unisono.kernels import configure_exact_blas, exact_blas, linear, rms_norm, rope_and_cache, silu_mul
from unisono.kernels.gemm.linear import blas_linear, launch_linear, linear_tile
from unisono.kernels.gemm.tile import Tile

QWEN3_8B = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate+up": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}  # name: N, K
TINY = {
    "tiny qkv": (512, 256),
    "tiny o": (256, 256),
    "tiny down": (256, 768),
    "tiny lm_head": (4096, 256),
    "odd": (250, 100),
}
ROWS = (1, 2, 3, 5, 8, 16, 17, 64, 200, 256, 257, 512, 2048)
L2_BYTES = 512 * 2**20
"""Bytes a timed graph walks through: many times the 60 MB of L2."""

DEVICE = "cuda"

Table = list[list[str]]


def markdown(head: list[str], rows: Table) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def cold(op: Callable[[torch.Tensor], object], big: torch.Tensor, extra_bytes: int = 0) -> float:
    """µs of ``op(copy of big)``, with the copies rotated out of L2."""
    size = big.numel() * big.element_size() + extra_bytes
    copies = [big] + [big.clone() for _ in range(min(L2_BYTES // size, 64))]
    launches = max(12, len(copies))
    cycle = itertools.islice(itertools.cycle(copies), launches)
    return graph_us([lambda w=w: op(w) for w in cycle])


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(torch.bfloat16)


def differing(out: torch.Tensor, want: torch.Tensor) -> int:
    return int((out != want[: out.shape[0]]).flatten(1).any(1).sum())


def bits_linear() -> Table:
    table = []
    for name, (n, k) in {**QWEN3_8B, **TINY}.items():
        x, weight = random(max(ROWS), k), random(n, k, scale=k**-0.5)
        bias, residual = random(n), random(max(ROWS), n)
        proven = exact_blas.prove(weight)
        bare, full = launch_linear(x, weight, None, None), launch_linear(x, weight, bias, residual)
        op = sum(differing(linear(x[:m], weight), bare) for m in ROWS)
        fused = sum(differing(linear(x[:m], weight, bias, residual[:m]), full) for m in ROWS)
        blas = {m: differing(blas_linear(x[:m], weight, None, None), bare) for m in ROWS}
        odd = ", ".join(f"M={m}: {count}" for m, count in blas.items() if count) or "0"
        table.append([name, f"{n}×{k}", str(op), str(fused), odd, str(proven)])
    return table


def rope_inputs(tokens: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128) -> dict:
    pages = max(tokens // 16 + 2, 2)
    cache = torch.zeros(pages, kv_heads, 16, head_dim, device=DEVICE, dtype=torch.bfloat16)
    return {
        "q_norm": random(head_dim),
        "k_norm": random(head_dim),
        "eps": 1e-6,
        "cos_sin": torch.randn(4096, head_dim, device=DEVICE),
        "positions": torch.randint(0, 4096, (tokens,), device=DEVICE, dtype=torch.int32),
        "slot_mapping": torch.arange(16, 16 + tokens, device=DEVICE, dtype=torch.int32),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }


def rope(qkv: torch.Tensor, inputs: dict) -> torch.Tensor:
    """q, k and v of each token of qkv, [M, (Hq + 2 Hkv) D], as the op wrote them."""
    rows = qkv.shape[0]
    part = {**inputs, "positions": inputs["positions"][:rows], "slot_mapping": inputs["slot_mapping"][:rows]}
    q = rope_and_cache(qkv, **part)
    slots = part["slot_mapping"].long()
    k, v = (inputs[c][slots // 16, :, slots % 16].flatten(1) for c in ("k_cache", "v_cache"))
    return torch.cat((q.flatten(1), k, v), dim=1)


def bits_rest() -> Table:
    most = max(ROWS)
    inputs, weight = rope_inputs(most), random(4096)
    cases: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
        "rms_norm 4096": (lambda x: rms_norm(x, weight, 1e-6), random(most, 4096)),
        "silu_mul 12288": (silu_mul, random(most, 24576)),
        "rope_and_cache 32+8×128": (lambda x: rope(x, inputs), random(most, 6144)),
    }
    table = []
    for name, (op, x) in cases.items():
        want = op(x)
        table.append([name, "", str(sum(differing(op(x[:m]), want) for m in ROWS)), "", "", ""])
    return table


def speed_linear(rows: tuple[int, ...]) -> Table:
    table = []
    for name, (n, k) in QWEN3_8B.items():
        weight, cells = random(n, k, scale=k**-0.5), []
        for m in rows:
            x, residual = random(m, k), random(m, n) if name in ("o", "down") else None
            us = cold(lambda w, x=x, r=residual: linear(x, w, None, r), weight)
            cells.append(f"{us:.1f} ({n * k * 2e-3 / us:.0f})")
        table.append([f"linear {name} {n}×{k}", *cells])
    return table


def speed_rest(rows: tuple[int, ...]) -> Table:
    norm_weight = random(4096)

    def case(op: Callable[[torch.Tensor], object], width: int, moved: int) -> list[str]:
        cells = []
        for m in rows:
            us = cold(op, random(m, width))
            cells.append(f"{us:.1f} ({m * moved * 2e-3 / us:.0f})")
        return cells

    def rope_cell(m: int) -> str:
        inputs = rope_inputs(m)
        us = cold(lambda qkv: rope_and_cache(qkv, **inputs), random(m, 6144))
        return f"{us:.1f} ({m * 2 * 6144 * 2e-3 / us:.0f})"

    return [
        ["rms_norm 4096", *case(lambda x: rms_norm(x, norm_weight, 1e-6), 4096, 2 * 4096)],
        ["silu_mul 12288", *case(silu_mul, 24576, 3 * 12288)],
        ["rope_and_cache 32+8×128", *map(rope_cell, rows)],
    ]


def tiles(rows: int) -> Iterator[Tile]:
    """Blockings worth a try for this many rows: 16 … 160 KiB in flight, an accumulator that fits in registers."""
    block_m = max(16, triton.next_power_of_2(rows))
    for n, k, warps, stages in itertools.product((16, 32, 64, 128), (64, 128, 256, 512), (2, 4), (3, 4, 5, 6)):
        in_flight = (block_m + n) * k * 2 * (stages - 1)
        if 32 * 1024 <= in_flight <= 160 * 1024 and block_m * n <= 4096 * warps:
            if stages in (4, 5):
                yield Tile(block_m, n, k, warps, stages)
            if n >= 64 and k <= 128 and warps == 4:
                yield Tile(block_m, n, k, warps, stages, swapped=True)


def tune(rows: tuple[int, ...], ranks: int) -> Table:
    """The best tiles of a rank's part of each product."""
    table = []
    for (name, (whole, k)), m in itertools.product(QWEN3_8B.items(), rows):
        n = whole // ranks
        weight, x = random(n, k, scale=k**-0.5), random(m, k)
        results = []
        for tile in tiles(m):
            try:
                us = cold(lambda w, x=x, tile=tile: launch_linear(x, w, None, None, tile), weight)
            except triton.runtime.errors.OutOfResources:
                continue
            results.append((us, tile))
        best = sorted(results, key=lambda pair: pair[0])[:3]
        now = cold(lambda w, x=x: launch_linear(x, w, None, None), weight)
        cells = [f"{us:.1f}: {t.n}×{t.k}, {t.warps} w, {t.stages} s{', swapped' * t.swapped}" for us, t in best]
        table.append([f"{name} {n}×{k}", str(m), f"{now:.1f}: {linear_tile(m, n, weight.dtype)}", *cells])
    return table


def report(parts: list[str], rows: tuple[int, ...], ranks: int) -> Iterator[str]:
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16"
    if "bits" in parts:
        yield f"\n## Bits\nDiffering rows, summed over M = {', '.join(map(str, ROWS))}.\n"
        head = ["op", "N×K", "op differs", "with bias, residual", "cuBLASLt differs", "proven"]
        yield markdown(head, bits_linear() + bits_rest())
    if "speed" in parts:
        few, many = (1, 4, 16, 64), (256, 512, 2048)
        yield "\n## Speed\nµs (GB/s of the weight, or of inputs and outputs), inputs out of L2.\n"
        yield markdown(["op", *(f"M={m}" for m in few)], speed_linear(few) + speed_rest(few))
        yield "\n" + markdown(["op", *(f"M={m}" for m in many)], speed_linear(many) + speed_rest(many))
    if "tune" in parts:
        yield "\n## Tiles of the Triton product\nµs: N×K block, warps, stages.\n"
        yield markdown(["layer", "M", "now", "best", "second", "third"], tune(rows, ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=("bits", "speed", "tune"), default=["bits", "speed"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 24, 32, 64], help="tune: numbers of rows")
    parser.add_argument("--ranks", type=int, default=1, help="tune: for a rank's part of the products")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels needs an NVIDIA GPU; the CPU checks are in tests/kernels.")
    configure_exact_blas()
    torch.manual_seed(0)
    lines = []
    for line in report(args.only, tuple(args.rows), args.ranks):
        print(line, flush=True)
        lines.append(line)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
