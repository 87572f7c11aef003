"""What tests of experts share: random stacks, choices of experts, plans."""

from __future__ import annotations

import torch

from unisono.kernels.gemm.tile import Tile
from unisono.kernels.moe.experts import expert_down_op, expert_gate_up_op
from unisono.kernels.moe.plan import ExpertPlan, launch_sort_pairs, sort_pairs_op
from unisono.kernels.norm.activation import SILU

SMALL = Tile(16, 16, 16, 1, 2, across=True)


def choice(rows: int, experts: int, top_k: int) -> torch.Tensor:
    """Distinct experts of each row, [M, top_k] i32."""
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).to(torch.int32)


def inputs(rows, hidden, inner, experts, rides, dtype, device):
    """x, the stack of gate and up, the stack of down."""
    x = torch.randn(rows, hidden)
    gate_up = torch.randn(experts + rides, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(experts + rides, hidden, inner) * inner**-0.5
    return [t.to(device, dtype) for t in (x, gate_up, down)]


def plans(ids: torch.Tensor, experts: int, tile: int) -> dict[str, ExpertPlan]:
    """Both, of which a number of pairs has one."""
    sort = launch_sort_pairs if ids.is_cuda or torch.cuda.is_available() else sort_pairs_op.cpu
    return {"lead": ExpertPlan(ids, experts, tile), "sorted": ExpertPlan(ids, experts, tile, *sort(ids, experts, tile))}


def all_pairs(ids: torch.Tensor, experts: int, rides: int) -> list[tuple[int, int]]:
    """(expert, token) of each row of the products."""
    rows, top_k = ids.shape
    listed = [(e, pair // top_k) for pair, e in enumerate(ids.flatten().tolist())]
    return listed + [(experts, token) for token in range(rows) if rides]


def expert_gate_up_cpu(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """The twin of ``expert_gate_up``, without biases, with SiLU."""
    return expert_gate_up_op.cpu(x, weight, ids, experts, 0, None, None, None, *SILU)


def expert_down_cpu(h: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """The twin of ``expert_down``, without biases."""
    return expert_down_op.cpu(h, weight, ids, experts, 0, None, None, None)
