"""Products of few rows with ranks' parts of an 8B's weights on one GPU: bits and µs of both kernels.

    python -m benchmarks.parts [--rows 1 64] [--ranks 4 2] [--tiles 8 16]

Each product follows a norm of its rows, as it follows a gather on a rank; µs are those of both launches, over weights
that the L2 does not hold. *floor*: the weight at 4.68 TB/s. ``--tiles``: also other tiles of the kernel, by outputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.experts import graph_us
from unisono.kernels.gemm import rows_gluon
from unisono.kernels.gemm.linear import launch_linear
from unisono.kernels.norm.rms_norm import launch_rms_norm

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate and up": (24576, 4096), "down": (4096, 12288)}
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def chain(product: Product, x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product of a norm's rows."""
    return product(launch_rms_norm(x, norm, 1e-6), weight)


def line(name: str, ranks: int, rows: int, outputs: list[int]) -> str:
    """A line of the table."""
    n, k = PRODUCTS[name][0] // ranks, PRODUCTS[name][1]
    many = max(2, 200_000_000 // (2 * n * k))
    weights = [torch.randn(n, k, device="cuda").bfloat16() * k**-0.5 for _ in range(many)]
    x, norm = torch.randn(rows, k, device="cuda").bfloat16(), torch.ones(k, device="cuda").bfloat16()
    ours: Product = lambda x, w: launch_linear(x, w, None, None)  # noqa: E731
    new: Product = lambda x, w: rows_gluon.launch_rows(x, w, None, None)  # noqa: E731
    differ = sum(int((chain(ours, x, norm, w) != chain(new, x, norm, w)).sum()) for w in weights)
    us = [graph_us([partial(chain, product, x, norm, w) for w in weights], 15) for product in (ours, new)]
    tiles = []
    for each in outputs:
        tile = rows_gluon.RowsTile.fitting(rows, each, k)
        other: Product = lambda x, w, t=tile: rows_gluon.launch_rows(x, w, None, None, t)  # type: ignore[misc]  # noqa: E731
        tiles.append(f"{each}: {graph_us([partial(chain, other, x, norm, w) for w in weights], 9):.1f}")
    alone = graph_us([partial(launch_rms_norm, x, norm, 1e-6)] * 20, 9)
    cells = (f"{us[0]:.1f}", f"{us[1]:.1f}", f"{alone:.1f}", f"{2 * n * k / 4.68e6:.1f}", ", ".join(tiles), differ)
    return f"| {name}, {ranks} ranks | {rows} | {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 2])
    parser.add_argument("--products", nargs="+", choices=list(PRODUCTS), default=list(PRODUCTS))
    parser.add_argument("--tiles", nargs="+", type=int, default=[])
    chosen = parser.parse_args()
    print("| product | rows | Triton | wgmma | a norm alone | floor | by outputs | elements that differ |")
    print("|---|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for ranks in chosen.ranks:
            for name in chosen.products:
                for rows in chosen.rows:
                    print(line(name, ranks, rows, chosen.tiles), flush=True)


if __name__ == "__main__":
    main()
