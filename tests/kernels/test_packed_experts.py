"""The Hopper kernel of experts with 4-bit weights, its programs as threads and on a GPU."""

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine
from tests.kernels.launches import forget
from unisono.kernels import hopper, overlap
from unisono.kernels.gemm import packed_decoding
from unisono.kernels.gemm import packed_gluon as pieces
from unisono.kernels.gemm.packed_decoding import NVFP4_GROUP
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.moe import gluon, packed_gluon
from unisono.kernels.moe.integers import (
    exact_int4_experts,
    expert_integer_down,
    expert_integer_gate_up,
    expert_integer_up,
)
from unisono.kernels.moe.nvfp4 import (
    exact_nvfp4_experts,
    expert_nvfp4_down,
    expert_nvfp4_gate_up,
    expert_nvfp4_up,
)
from unisono.kernels.moe.plan import ExpertPlan, Shapes, sort_pairs_op

NVFP4 = (expert_nvfp4_gate_up, expert_nvfp4_up, expert_nvfp4_down)
INT4 = (expert_integer_gate_up, expert_integer_up, expert_integer_down)


def stack_of(kind: str, experts: int, n: int, k: int) -> tuple:
    """Operands of a random stack [E, N, K] for the format's products."""
    packed = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8)
    if kind == "nvfp4":
        scales = torch.randint(40, 70, (experts, n, k // 16), dtype=torch.uint8)
        return packed, scales, 0.1 * (0.5 + torch.rand(experts, n))
    zeros = torch.randint(0, 16, (experts, n, -(-k // 128))).to(torch.int8) if kind == "int4 zeros" else None
    return packed, (0.5 + torch.rand(experts, n, -(-k // 128))) * 0.01, zeros, 128


def unequal_plan(rows: int, experts: int, top_k: int, tile: int, lead: bool) -> ExpertPlan:
    """Experts with none, one and many of the pairs; the last token has no expert."""
    ids = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(rows)]).to(torch.int32)
    ids[: rows // 2, 0] = experts - 1
    ids[-1] = experts
    return ExpertPlan(ids, experts, tile, *(() if lead else sort_pairs_op.cpu(ids, experts, tile)))


@pytest.mark.parametrize(
    ("product", "plan_of", "kind"),
    [
        ("gate and up", "lead", "nvfp4"),
        ("gate and up", "sorted", "int4 zeros"),
        ("up", "sorted, two groups", "int4"),
        ("down", "lead", "int4 zeros"),
        ("down", "sorted, two groups", "nvfp4"),
        ("gate and up", "lead, 32 outputs", "int4 zeros"),
        ("down", "lead, 32 outputs", "nvfp4"),
    ],
)
def test_programs_compute_the_products(product, plan_of, kind):
    """Stages are free before they are loaded, each pair has its own expert, and no other row is written."""
    rows, experts, top_k, rides, (k, n) = 21, 5, 2, int(product != "up"), (704, 72)
    gated, lead, groups = product == "gate and up", plan_of[:4] == "lead", 1 + (plan_of == "sorted, two groups")
    outputs = 32 if "32" in plan_of else 64 * groups
    tile = Tile(32 if lead else 16, outputs, 128, 8, 3, registers=80)
    plan, operands = unequal_plan(rows, experts, top_k, 16, lead), stack_of(kind, experts + rides, n * (1 + gated), k)
    x = torch.randn(rows * (top_k + rides) if product == "down" else rows, k).half()
    of_kind = (NVFP4 if kind == "nvfp4" else INT4)[("gate and up", "up", "down").index(product)]
    wanted = of_kind(x, *operands, plan)
    weight, scales, zeros = operands[:3]
    out, nvfp4 = torch.full_like(wanted, torch.nan), kind == "nvfp4"
    shapes = Shapes(rows, 0, 0, experts, top_k, rides > 0)
    sizes = packed_gluon._sizes(shapes, k, n, gated, product == "up", lead, tile)
    tiles = plan.listed + (rides if lead else rides * -(-rows // 16))
    Machine((packed_gluon, gluon, pieces, packed_decoding, hopper, overlap), tiles * sizes["PARTS"]).run(
        packed_gluon.packed_experts_kernel, x=x,
        w_desc=Descriptor(weight.view(-1, k // 2), [min(outputs, 64) // 2, 64]),
        scales=scales.view(torch.int32) if nvfp4 else scales,
        zeros=torch.zeros(1) if zeros is None else zeros, out=out, ids=plan.ids,
        order=torch.zeros(0, dtype=torch.int32) if lead else plan.order,
        tiles=torch.zeros(0, dtype=torch.int32) if lead else plan.tiles, M=rows, count=plan.listed,
        INPUTS=NVFP4_GROUP if nvfp4 else 128, NVFP4=nvfp4, HAS_ZEROS=kind == "int4 zeros", OVERLAP=True, **sizes,
    )  # fmt: skip
    written = torch.ones(len(out), dtype=torch.bool)
    written[(rows - 1) * top_k : rows * top_k] = False  # of the token without experts
    torch.testing.assert_close(out[written], wanted[written], rtol=5e-3, atol=5e-3)
    assert out[~written].isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["nvfp4", "int4 zeros"])
def test_the_kernel_has_the_tritons_bits(kind, gated, device):
    hidden, inner, experts, top_k, rides = 320, 704, 8, 2, int(gated)
    sizes = (inner * (1 + gated), hidden), (hidden, inner)
    stacks = [
        tuple(t.to(device) if isinstance(t, torch.Tensor) else t for t in stack_of(kind, experts + rides, *size))
        for size in sizes
    ]
    exact, dtype = exact_nvfp4_experts if kind == "nvfp4" else exact_int4_experts, torch.bfloat16
    assert exact.same_bits(*stacks, dtype, experts, top_k, gated)


@pytest.mark.parametrize("exact", [exact_nvfp4_experts, exact_int4_experts])
def test_a_device_without_the_kernel_keeps_the_triton_one(exact, monkeypatch):
    kind = "nvfp4" if exact is exact_nvfp4_experts else "int4"
    stacks = stack_of(kind, 4, 256, 128), stack_of(kind, 4, 128, 128)
    assert not exact.same_bits(*stacks, torch.bfloat16, 4, 2, True)
    assert exact.prove(*stacks, torch.bfloat16, 4, 2, True), "nothing to compare on a CPU"
    forget(monkeypatch, exact)
    assert not exact.runs(torch.zeros(2, 128).bfloat16(), ExpertPlan(torch.zeros(2, 2), 4, 16), True, *stacks[0])
