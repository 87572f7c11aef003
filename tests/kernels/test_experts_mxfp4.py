"""Experts with biases and a clamped SwiGLU against float64; MXFP4 experts have the bits of their decoded weights."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.expert_cases import SMALL, all_pairs, choice, inputs, plans
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.moe.experts import expert_down, expert_gate_up, launch_down, launch_gate_up
from unisono.kernels.moe.mxfp4 import (
    WIDTH,
    decode,
    expert_mxfp4_down,
    expert_mxfp4_gate_up,
    launch_mxfp4_down,
    launch_mxfp4_gate_up,
)
from unisono.kernels.moe.plan import ExpertPlan
from unisono.kernels.norm.activation import SILU, ExpertGate

GATE = ExpertGate(1.702, 0.7)
STEP = Tile(16, 16, WIDTH, 1, 2, across=True)
"""The interpreter adds a step's products first, so steps have to be as long."""

Packed = tuple[torch.Tensor, torch.Tensor]


def packed(experts: int, n: int, k: int) -> Packed:
    """Random bits, and powers of two that make a sum of about 1."""
    weight = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8)
    return weight, torch.randint(121, 125, (experts, n, k // 32), dtype=torch.uint8)


def by_hand(weight: torch.Tensor, scales: torch.Tensor) -> list[float]:
    """The values of one row, by the definitions of e2m1 and e8m0."""
    found = []
    for i in range(2 * len(weight)):
        bits = int(weight[i // 2]) >> 4 * (i % 2) & 15
        sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
        value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        found.append((-1) ** sign * value * 2.0 ** (int(scales[i // 32]) - 127))
    return found


@pytest.mark.parametrize("run", ["kernel", "twin"])
def test_every_byte_and_every_scale(run, device):
    """Products with unit vectors are the weights themselves. All bytes, all scales that are numbers."""
    weight = torch.arange(256, dtype=torch.uint8).repeat(1, 16, 1)[..., :256].contiguous()  # 512 inputs
    scales = torch.arange(255, dtype=torch.uint8)
    scales = torch.cat((scales, scales[:1])).view(1, 16, 16)
    want = torch.tensor([by_hand(*row) for row in zip(weight[0], scales[0], strict=True)], dtype=torch.float64)
    want = want.float()  # where float32 has no such number it is infinite
    decoded = decode(weight, scales, torch.float32)[0]
    assert torch.equal(decoded, want)
    finite = want.isfinite().all(0)
    unit = torch.eye(512)[finite].to(device)
    ids = torch.zeros(len(unit), 1, dtype=torch.int32, device=device)
    plan = plans(ids, 1, 16)["sorted"]
    down = expert_mxfp4_down if run == "twin" else lambda h, *stack: launch_mxfp4_down(h, *stack, None)
    operands = unit, weight.to(device), torch.where(scales > 200, 200, scales).to(device)
    got = down(*operands, plan)
    want = decode(weight, torch.where(scales > 200, 200, scales), torch.float32)[0].T[finite]
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("plan", ["lead", "sorted", "twin"])
def test_biases_and_the_clamped_gate_match_float64(plan, dtype, device, assert_close):
    rows, hidden, inner, experts, top_k, rides = 6, 40, 24, 5, 2, 1
    on = torch.device("cpu") if plan == "twin" else device
    x, gate_up, down = inputs(rows, hidden, inner, experts, rides, dtype, on)
    of_up, of_down = (torch.randn(experts + rides, n).to(on, dtype) for n in (2 * inner, hidden))
    ids = choice(rows, experts, top_k).to(on)
    pairs = all_pairs(ids, experts, rides)
    both = torch.stack([gate_up[e].double() @ x[token].double() + of_up[e].double() for e, token in pairs])
    gate, up = both[:, :inner].clamp(max=GATE.limit), both[:, inner:].clamp(-GATE.limit, GATE.limit)
    assert (both[:, :inner] > GATE.limit).any()
    assert (both[:, inner:] < -GATE.limit).any()
    expected = (up + 1) * gate * torch.sigmoid(GATE.alpha * gate)
    if plan == "twin":
        h = expert_gate_up(x, gate_up, ExpertPlan(ids, experts, 16), of_up, GATE)
        y = expert_down(h, down, ExpertPlan(ids, experts, 16), of_down)
    else:
        chosen = plans(ids, experts, 16)[plan]
        h = launch_gate_up(x, gate_up, chosen, SMALL, of_up, GATE)
        y = launch_down(h, down, chosen, SMALL, of_down)
    assert_close(h, expected)
    assert_close(
        y, torch.stack([down[e].double() @ h[i].double() + of_down[e].double() for i, (e, _) in enumerate(pairs)])
    )


@pytest.mark.parametrize("plan", ["lead", "sorted", "twin"])
@pytest.mark.parametrize("shape", [(3, 96, 32, 3, 2, 1, GATE), (18, 64, 64, 1, 1, 0, SILU)])
def test_mxfp4_has_the_bits_of_the_decoded_weights(shape, plan, dtype, device):
    rows, hidden, inner, experts, top_k, rides, gate = shape
    on = torch.device("cpu") if plan == "twin" else device
    up, down = packed(experts + rides, 2 * inner, hidden), packed(experts + rides, hidden, inner)
    up, down = ([t.to(on) for t in stack] for stack in (up, down))
    of_up, of_down = (torch.randn(experts + rides, n).to(on, dtype) for n in (2 * inner, hidden))
    x, ids = torch.randn(rows, hidden).to(on, dtype), choice(rows, experts, top_k).to(on)
    plain_up, plain_down = decode(*up, dtype), decode(*down, dtype)
    if plan == "twin":
        chosen = ExpertPlan(ids, experts, 16)
        h = expert_mxfp4_gate_up(x, *up, chosen, of_up, gate)
        assert torch.equal(h, expert_gate_up(x, plain_up, chosen, of_up, gate))
        assert torch.equal(expert_mxfp4_down(h, *down, chosen, of_down), expert_down(h, plain_down, chosen, of_down))
        return
    chosen = plans(ids, experts, 16 if plan == "lead" else 32)[plan]
    h = launch_mxfp4_gate_up(x, *up, chosen, of_up, gate)
    assert h.float().std() > 0.1
    assert torch.equal(h, launch_gate_up(x, plain_up, chosen, STEP, of_up, gate))
    y = launch_mxfp4_down(h, *down, chosen, None)
    assert torch.equal(y, launch_down(h, plain_down, chosen, STEP))


def test_ops_know_their_shapes():
    meta = torch.device("meta")
    up, down = ([t.to(meta) for t in packed(5, n, k)] for n, k in ((128, 96), (96, 64)))
    plan = ExpertPlan(torch.zeros(3, 2, dtype=torch.int32, device=meta), 4, 16)
    h = expert_mxfp4_gate_up(torch.empty(3, 96, device=meta), *up, plan)
    assert h.shape == (3 * 2 + 3, 64)
    assert expert_mxfp4_down(h, *down, plan).shape == (9, 96)
