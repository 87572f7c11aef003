"""Experts in fp8 and 4 bits: a pair's row is that of the expert's own linear layer, in any plan, tile and batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine
from tests.kernels.launches import forget
from unisono.kernels import hopper, silu_mul
from unisono.kernels.gemm.fp8 import fp8_linear
from unisono.kernels.gemm.fp8_quantize import E4M3, GROUP, Quantised, quantize, quantize_cpu, widened_activations
from unisono.kernels.gemm.int4 import int4_linear
from unisono.kernels.gemm.int8 import int8_linear
from unisono.kernels.gemm.int8_weights import int8_weight_linear
from unisono.kernels.moe import fp8 as experts_fp8
from unisono.kernels.moe import gluon as experts_gluon
from unisono.kernels.moe.fp8 import (
    expert_fp8_down,
    expert_fp8_gate_up,
    expert_fp8_gate_up_fp8,
    expert_fp8_up,
    launch_fp8_down,
    launch_fp8_gate_up,
)
from unisono.kernels.moe.int8 import expert_int8_down, expert_int8_gate_up, launch_int8_down, launch_int8_gate_up
from unisono.kernels.moe.integers import (
    expert_integer_down,
    expert_integer_gate_up,
    expert_integer_up,
    launch_integer_down,
    launch_integer_gate_up,
)
from unisono.kernels.moe.plan import LEAD_PAIRS, ExpertPlan, Shapes, launch_sort_pairs, sort_pairs_op
from unisono.kernels.norm.activation import SILU
from unisono.layers.formats.base import WHOLE, Share
from unisono.layers.formats.experts_quantised import Fp8Experts

KINDS = ["fp8 by block", "fp8 by output", "int4", "int4 with zeros", "int8", "int8 with zeros", "a8"]
UNGATED = [kind for kind in KINDS if kind != "a8"]
"""Formats whose kernels compute experts without a gate."""
SHAPES = [(3, 136, 40, 4, 2, 1), (1, 160, 136, 4, 2, 0), (9, 128, 96, 3, 1, 1)]  # M, H, I, E, top_k, riding along

Operands = tuple
"""Of a stack: the weight and what else its products take."""


def stack_of(kind: str, experts: int, parts: list[int], k: int) -> Operands:
    """A stack whose weights have projections of these sizes."""
    n = sum(parts)
    if kind.startswith("fp8"):
        rows = sum(-(-part // 128) for part in parts)
        shape = (experts, rows, -(-k // 128)) if kind == "fp8 by block" else (experts, n)
        return (torch.randn(experts, n, k) * 50).to(E4M3), (0.5 + torch.rand(shape)) * 1e-3
    if kind == "a8":
        return torch.randint(-128, 128, (experts, n, k), dtype=torch.int8), (0.5 + torch.rand(experts, n)) * 1e-3
    bits = 8 if kind.startswith("int8") else 4
    packed, scales = (
        torch.randint(0, 256, (experts, n, k * bits // 8), dtype=torch.uint8),
        (0.002 + 0.01 * torch.rand(experts, n, -(-k // 32))) * 2 ** (4 - bits),
    )
    zeros = torch.randint(0, 2**bits, scales.shape).to(torch.int16 if bits == 8 else torch.int8)
    zeros = zeros if kind.endswith("with zeros") else None
    return packed, scales, zeros, 32


def of_expert(stack: Operands, expert: int, part: int = 0, parts: int = 1) -> Operands:
    """What the linear op takes for one projection of one expert."""
    return tuple(t[expert].chunk(parts)[part] if isinstance(t, torch.Tensor) else t for t in stack)


def linear_of(kind: str) -> Callable[..., torch.Tensor]:
    if kind == "a8":
        return int8_linear
    return fp8_linear if kind.startswith("fp8") else int8_weight_linear if kind.startswith("int8") else int4_linear


def ops_of(kind: str, launched: bool) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    if kind.startswith("fp8"):
        return (launch_fp8_gate_up, launch_fp8_down) if launched else (expert_fp8_gate_up, expert_fp8_down)
    if kind == "a8":
        return (launch_int8_gate_up, launch_int8_down) if launched else (expert_int8_gate_up, expert_int8_down)
    return (launch_integer_gate_up, launch_integer_down) if launched else (expert_integer_gate_up, expert_integer_down)


def on(device: torch.device, stack: Operands) -> Operands:
    return tuple(t.to(device) if isinstance(t, torch.Tensor) else t for t in stack)


def choice(rows: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).to(torch.int32)


def plans(ids: torch.Tensor, experts: int, tile: int) -> dict[str, ExpertPlan]:
    sort = launch_sort_pairs if ids.is_cuda or torch.cuda.is_available() else sort_pairs_op.cpu
    return {"lead": ExpertPlan(ids, experts, tile), "sorted": ExpertPlan(ids, experts, tile, *sort(ids, experts, tile))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_output_row_of_a_pair_matches_its_expert(kind, shape):
    """The twins against one linear layer for each pair, which its own tests compare with float64."""
    rows, hidden, inner, experts, top_k, rides = shape
    up, down = stack_of(kind, experts + rides, [inner, inner], hidden), stack_of(kind, experts + rides, [hidden], inner)
    x, ids, linear = torch.randn(rows, hidden), choice(rows, experts, top_k), linear_of(kind)
    pairs = [(e, i // top_k) for i, e in enumerate(ids.flatten().tolist())] + [
        (experts, t) for t in range(rows * rides)
    ]
    gate_up, project = ops_of(kind, launched=False)
    h = gate_up(x, *up, plan=ExpertPlan(ids, experts, 16))
    y = project(h, *down, plan=ExpertPlan(ids, experts, 16))
    assert h.shape == (len(pairs), inner)
    for i, (expert, token) in enumerate(pairs):
        row = x[token : token + 1]

        def of_projection(part: int, row=row, expert=expert) -> torch.Tensor:
            weight, scales, *more = of_expert(up, expert, part, 2)
            return linear(row, weight, scales, *more)

        want = silu_mul(torch.cat([of_projection(0), of_projection(1)], 1))
        torch.testing.assert_close(h[i : i + 1], want, rtol=1e-5, atol=1e-6)
        weight, scales, *more = of_expert(down, expert)
        torch.testing.assert_close(y[i : i + 1], linear(h[i : i + 1], weight, scales, *more), rtol=1e-5, atol=1e-6)


TWINS = [
    pytest.param(*cell, marks=() if (i + i // 2 + i // 4) % 2 == 0 else pytest.mark.full)
    for i, cell in enumerate(itertools.product(KINDS, SHAPES[:2], ["lead", "sorted"]))
]


@pytest.mark.parametrize(("kind", "shape", "plan"), TWINS)
def test_kernels_match_their_references(kind, shape, plan, dtype, device, assert_close):
    rows, hidden, inner, experts, top_k, rides = shape
    up, down = stack_of(kind, experts + rides, [inner, inner], hidden), stack_of(kind, experts + rides, [hidden], inner)
    x, ids = torch.randn(rows, hidden).to(dtype), choice(rows, experts, top_k)
    gate_up, project = ops_of(kind, launched=False)
    want = gate_up(x, *up, plan=ExpertPlan(ids, experts, 16))
    launch_up, launch_project = ops_of(kind, launched=True)
    chosen = plans(ids.to(device), experts, 16)[plan]
    got = launch_up(x.to(device), *on(device, up), plan=chosen)
    e4m3 = kind.startswith("fp8")
    assert_close(got, want, e4m3)
    # e4m3 of slightly other inner activations may be another value: both get the twin's
    y = launch_project(want.to(device), *on(device, down), plan=chosen)
    assert_close(y, project(want, *down, plan=ExpertPlan(ids, experts, 16)), e4m3)


@pytest.mark.parametrize("kind", KINDS)
def test_plans_and_tiles_have_the_same_bits(kind, device):
    rows, hidden, inner, experts, top_k, rides = 18, 128, 40, 2, 1, 1
    up, down = stack_of(kind, experts + rides, [inner, inner], hidden), stack_of(kind, experts + rides, [hidden], inner)
    up, down, ids = on(device, up), on(device, down), choice(rows, experts, top_k).to(device)
    x = torch.randn(rows, hidden, device=device, dtype=torch.float16)
    launch_up, launch_project = ops_of(kind, launched=True)
    chosen = plans(ids, experts, 16)
    h = launch_up(x, *up, plan=chosen["lead"])
    y = launch_project(h, *down, plan=chosen["lead"])
    for plan in (chosen["sorted"], plans(ids, experts, 32)["sorted"]):
        assert torch.equal(launch_up(x, *up, plan=plan), h), (plan.tile, plan.tiles is None)
        assert torch.equal(launch_project(h, *down, plan=plan), y), (plan.tile, plan.tiles is None)
    alone = launch_up(x[3:4], *up, plan=ExpertPlan(ids[3:4], experts, 16))
    assert torch.equal(alone, torch.cat([h[3 * top_k : 4 * top_k], h[rows * top_k + 3 :][:1]]))


def up_of(kind: str) -> Callable[..., torch.Tensor]:
    return expert_fp8_up if kind.startswith("fp8") else expert_integer_up


@pytest.mark.parametrize("kind", UNGATED)
def test_output_row_without_a_gate_matches_its_expert(kind):
    rows, hidden, inner, experts, top_k = 3, 160, 136, 4, 2
    up, x, ids = stack_of(kind, experts, [inner], hidden), torch.randn(rows, hidden), choice(rows, experts, top_k)
    h = up_of(kind)(x, *up, plan=ExpertPlan(ids, experts, 16))
    assert h.shape == (rows * top_k, inner)
    for i, expert in enumerate(ids.flatten().tolist()):
        want = linear_of(kind)(x[i // top_k : i // top_k + 1], *of_expert(up, expert)).relu().square()
        torch.testing.assert_close(h[i : i + 1], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", UNGATED)
def test_kernels_without_a_gate_match_their_references_in_any_plan(kind, dtype, device, assert_close):
    rows, hidden, inner, experts, top_k = 18, 128, 40, 3, 2
    up, ids = stack_of(kind, experts, [inner], hidden), choice(rows, experts, top_k)
    ids[5] = experts  # padding
    x = (0.3 * torch.randn(rows, hidden)).to(dtype)
    given = ids.flatten() < experts
    want = up_of(kind)(x, *up, plan=ExpertPlan(ids, experts, 16))[given]
    _, launch = ops_of(kind, launched=True)
    x, up, found = x.to(device), on(device, up), {}
    for tile in (16, 32):
        for name, plan in plans(ids.to(device), experts, tile).items():
            if tile == 16 or name == "sorted":
                found[name, tile] = launch(x, *up, plan=plan, up=True)[given.to(device)]
    assert_close(found["lead", 16], want, kind.startswith("fp8"))
    assert all(torch.equal(found["lead", 16], each) for each in found.values())
    alone = launch(x[3:4], *up, plan=ExpertPlan(ids[3:4].to(device), experts, 16), up=True)
    assert torch.equal(alone, found["lead", 16][3 * top_k : 4 * top_k])


def both_groups_and_one(rows: int, experts: int, top_k: int, tile: int) -> ExpertPlan:
    """Choices with a row of padding, whose tiles have pairs for both warp groups of a program, for one, for none."""
    ids = torch.cat((torch.tensor([[0, 1, 2]]).repeat(rows - 4, 1), choice(4, experts - 1, top_k))).int()
    ids[-1] = experts
    ids[:30, 1] = 0  # 96 pairs and more
    plan = ExpertPlan(ids, experts, tile, *sort_pairs_op.cpu(ids, experts, tile))
    assert {(n > 0) + (n > 64) for n in plan.tiles[2].tolist()} == {0, 1, 2}
    return plan


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize("made", ["fp8 by block", "fp8 by output", "quantised"])
def test_prefill_kernel_threads_wait_for_their_inputs(made, programs):
    """As threads (``gluon_threads``): other scales in each step and half of a tile, outputs beyond the last."""
    rows, experts, top_k, rides = 70, 5, 3, programs - 1
    kind = "fp8 by output" if made == "fp8 by output" else "fp8 by block"
    plan = both_groups_and_one(rows, experts, top_k, experts_gluon.TILE_PAIRS)
    written = torch.ones(rows * (top_k + rides), dtype=torch.bool)
    written[(rows - 1) * top_k : rows * top_k] = False  # rows of padding are not
    for gated, k, n in ((True, 640, 192), (False, 384, 320)):  # the last blocks of outputs are in a tile alone
        weight, scales = stack_of(kind, experts + rides, [n, n] if gated else [n], k)
        x = torch.randn(rows if gated else len(written), k).half()
        wanted = (expert_fp8_gate_up if gated else expert_fp8_down)(x, weight, scales, plan)
        x8, x_scales = quantize_cpu(x, GROUP if kind == "fp8 by block" else None)
        out = torch.full_like(wanted, torch.nan)
        out8, out_scales = (torch.full_like(t.float(), torch.nan) for t in quantize_cpu(wanted, GROUP))
        shapes, quantised = Shapes(rows, 0, 0, experts, top_k, rides > 0), gated and made == "quantised"
        sizes = experts_gluon._sizes(shapes, k, n, gated, scales.dim() - 1, quantised)
        Machine((experts_gluon, hopper), programs).run(
            experts_gluon.expert_rows_kernel, x=x8, w_desc=Descriptor(weight.view(-1, k), [128, 128]),
            x_scales=x_scales, w_scales=scales, out=out, out8=out8, out_scales=out_scales, order=plan.order,
            tiles=plan.tiles, M=rows, count=plan.listed, PADDED=len(x8), padded=len(out8), **sizes,
        )  # fmt: skip
        got = widened_activations(out8, out_scales) if quantised else out
        near = {"rtol": 0.08, "atol": 0.02} if quantised else {"rtol": 0.01, "atol": 0.01}
        torch.testing.assert_close(got[written].to(wanted.dtype), wanted[written], **near)
        assert got[~written].isnan().all()
        if quantised:
            torch.testing.assert_close(
                out_scales[:, written], quantize_cpu(wanted, GROUP)[1][:, written], rtol=0.01, atol=0
            )


@pytest.mark.parametrize("kind", ["fp8 by block", "fp8 by output"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_quantised_output_equals_quantised_output(kind, shape):
    """Both kinds of operand of ``down`` give the same rows, and gate and up with a quantised result make it."""
    rows, hidden, inner, experts, top_k, rides = shape
    up, down = stack_of(kind, experts + rides, [inner, inner], hidden), stack_of(kind, experts + rides, [hidden], inner)
    x, plan = torch.randn(rows, hidden), ExpertPlan(choice(rows, experts, top_k), experts, 16)
    h = expert_fp8_gate_up(x, *up, plan)
    by_block = kind == "fp8 by block"
    h8 = expert_fp8_gate_up_fp8(x, *up, plan) if by_block else quantize(h, 0)
    assert h8.rows == len(h)
    assert torch.equal(h8.x8[: len(h)].float(), quantize(h, GROUP if by_block else 0).x8[: len(h)].float())
    assert torch.equal(expert_fp8_down(h8, *down, plan), expert_fp8_down(h, *down, plan))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("kind", ["fp8 by block", "fp8 by output"])
@pytest.mark.parametrize("shape", [(2048, 512, 64, 8, 1), (2048, 768, 16, 8, 0), (384, 640, 8, 2, 1)])
def test_the_kernel_of_prompts_has_the_tritons_bits(shape, kind, device):
    hidden, inner, experts, top_k, rides = shape
    up, down = stack_of(kind, experts + rides, [inner, inner], hidden), stack_of(kind, experts + rides, [hidden], inner)
    for dtype in (torch.bfloat16, torch.float16):
        assert experts_fp8._same_bits(on(device, up), on(device, down), dtype, experts, top_k)


def test_gathered_gate_outputs_are_not_quantised() -> None:
    """A rank that has some of gate's outputs makes plain rows, which are gathered; one that has all may quantise."""
    up = stack_of("fp8 by block", 4, [128, 128], 128)
    format = Fp8Experts(SimpleNamespace(operands=lambda _: up, fixed_kind=None))
    x, plan = torch.randn(3, 128), ExpertPlan(choice(3, 4, 2), 4, experts_gluon.TILE_PAIRS)
    whole, part = (
        format.gate_up(SimpleNamespace(rows=rows, gate=SILU, gated=True), x, plan) for rows in (WHOLE, Share(0, 2))
    )
    assert isinstance(whole, Quantised)
    assert torch.equal(whole.x8[: len(part)].float(), quantize(part, GROUP).x8[: len(part)].float())


@pytest.mark.parametrize("same", [True, False])
def test_prompts_run_on_the_kernel_that_is_proven(same, monkeypatch):
    """Its tiles have 128 pairs; a stack of other scales, or activations of another dtype, need a proof of their own."""
    experts, pairs = 16, 16 * experts_gluon.FEWEST
    forget(monkeypatch, experts_fp8.exact_fp8_experts)
    monkeypatch.setattr(experts_fp8.exact_fp8_experts, "same_bits", lambda *_: same)
    up, down = stack_of("fp8 by block", experts, [128, 128], 128), stack_of("fp8 by block", experts, [128], 128)
    assert experts_fp8.exact_fp8_experts.prove(up, down, torch.bfloat16, experts, 2) is same
    ours = experts_fp8.fp8_tile_rows(pairs, experts)
    tile = lambda stack, count, dtype=torch.bfloat16: experts_fp8.fp8_expert_tile(count, experts, stack, dtype)  # noqa: E731
    assert tile(up, pairs) == (experts_gluon.TILE_PAIRS if same else ours)
    assert tile(up, pairs - 1) == experts_fp8.fp8_tile_rows(pairs - 1, experts) != experts_gluon.TILE_PAIRS
    assert tile(up, pairs, torch.float16) == ours
    assert tile(stack_of("fp8 by output", experts, [128, 128], 128), pairs) == ours
    assert experts_fp8.fp8_expert_tile(LEAD_PAIRS, 1, up, torch.bfloat16) != experts_gluon.TILE_PAIRS  # not sorted


@pytest.mark.parametrize("kind", KINDS)
def test_padding_goes_to_no_expert(kind, device, assert_close):
    rows, hidden, inner, experts = 4, 128, 32, 3
    up = stack_of(kind, experts, [inner, inner], hidden)
    ids = torch.tensor([[0, 2], [3, 3], [1, 0], [3, 3]], dtype=torch.int32)
    x = torch.randn(rows, hidden)
    gate_up, _ = ops_of(kind, launched=False)
    want = gate_up(x[[0, 2]], *up, plan=ExpertPlan(ids[[0, 2]], experts, 16))
    got = gate_up(x, *up, plan=ExpertPlan(ids, experts, 16))
    assert torch.equal(got[[0, 1, 4, 5]], want)
    launch_up, _ = ops_of(kind, launched=True)
    for plan in plans(ids.to(device), experts, 16).values():
        rows_of = launch_up(x.to(device), *on(device, up), plan=plan)[[0, 1, 4, 5]]
        assert_close(rows_of, want, kind.startswith("fp8"))


@pytest.mark.parametrize("kind", KINDS)
def test_ops_know_their_shapes(kind):
    up, down = stack_of(kind, 5, [64, 64], 128), stack_of(kind, 5, [128], 64)
    meta = torch.device("meta")
    gate_up, project = ops_of(kind, launched=False)
    plan = ExpertPlan(torch.zeros(3, 2, dtype=torch.int32, device=meta), 4, 16)
    h = gate_up(torch.randn(3, 128).to(meta), *on(meta, up), plan=plan)
    assert h.shape == (3 * 2 + 3, 64)
    assert project(h, *on(meta, down), plan=plan).shape == (9, 128)
    if kind not in UNGATED:
        return
    plan = ExpertPlan(torch.zeros(3, 2, dtype=torch.int32, device=meta), 5, 16)
    assert up_of(kind)(torch.randn(3, 128).to(meta), *on(meta, up), plan=plan).shape == (6, 128)
