"""What tests of experts share: random stacks, choices of experts, plans."""

from __future__ import annotations

import torch

from unisono.kernels.moe.experts import Tile
from unisono.kernels.moe.plan import Plan, launch_sort_pairs, sort_pairs_cpu

SMALL = Tile(16, 16, 1, 2, True)


def choice(rows: int, experts: int, top_k: int) -> torch.Tensor:
    """Distinct experts of each row, [M, top_k] i32."""
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).to(torch.int32)


def inputs(rows, hidden, inner, experts, rides, dtype, device):
    """x, the stack of gate and up, the stack of down."""
    x = torch.randn(rows, hidden)
    gate_up = torch.randn(experts + rides, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(experts + rides, hidden, inner) * inner**-0.5
    return [t.to(device, dtype) for t in (x, gate_up, down)]


def plans(ids: torch.Tensor, experts: int, tile: int) -> dict[str, Plan]:
    """Both, of which a number of pairs has one."""
    sort = launch_sort_pairs if ids.is_cuda or torch.cuda.is_available() else sort_pairs_cpu
    return {"lead": Plan(ids, experts, tile), "sorted": Plan(ids, experts, tile, *sort(ids, experts, tile))}


def all_pairs(ids: torch.Tensor, experts: int, rides: int) -> list[tuple[int, int]]:
    """(expert, token) of each row of the products."""
    rows, top_k = ids.shape
    listed = [(e, pair // top_k) for pair, e in enumerate(ids.flatten().tolist())]
    return listed + [(experts, token) for token in range(rows) if rides]
