"""NVFP4 products: the written rule by hand, float64, the plain product's bits, the same in any batch; experts too."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.expert_cases import choice, plans
from unisono.kernels.gemm import nvfp4
from unisono.kernels.gemm.linear import launch_linear
from unisono.kernels.gemm.nvfp4 import (
    launch_nvfp4_decode,
    launch_nvfp4_linear,
    nvfp4_decode,
    nvfp4_linear,
    nvfp4_linear_cuda,
)
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.moe.experts import expert_down, expert_gate_up, expert_up
from unisono.kernels.moe.nvfp4 import (
    expert_nvfp4_down,
    expert_nvfp4_gate_up,
    expert_nvfp4_up,
    launch_nvfp4_down,
    launch_nvfp4_gate_up,
)
from unisono.kernels.moe.plan import ExpertPlan, sort_pairs_op
from unisono.kernels.norm.activation import GELU_TANH, SILU

SHAPES = [(1, 64, 256), (5, 70, 96), (20, 33, 208)]  # M, N, K
RUNS = [nvfp4_linear_cuda, nvfp4_linear.cpu]
STEP = Tile(16, 32, nvfp4.WIDTH, 4, 2)
"""The interpreter adds up each tile of K before it adds tiles, so the plain product has to have the same ones."""


def weight_of(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random bits, scales that are numbers, multipliers with which weights are around 0.06."""
    *more, k = shape
    scales = torch.randint(1, 127, (*more, k // 16), dtype=torch.uint8)
    return torch.randint(0, 256, (*more, k // 2), dtype=torch.uint8), scales, 5e-4 + 1e-3 * torch.rand(more)


def by_hand(packed, scales, multipliers) -> torch.Tensor:
    """One output's weights in float64, by the definitions of e2m1 and e4m3; the scale is rounded to fp32."""
    found = []
    for i in range(2 * len(packed)):
        bits, scale = int(packed[i // 2]) >> 4 * (i % 2) & 15, int(scales[i // 16])
        exponent, mantissa = bits >> 1 & 3, bits & 1
        value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        exponent, mantissa = scale >> 3 & 15, scale & 7
        factor = mantissa / 8 * 2.0**-6 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
        factor = torch.tensor(factor * (-1) ** (scale >> 7), dtype=torch.float64) * multipliers.double()
        found.append((-1) ** (bits >> 3) * value * factor.float().double())
    return torch.stack(found)


def dequantised(packed, scales, multipliers) -> torch.Tensor:
    return torch.stack([by_hand(*row) for row in zip(packed, scales, multipliers, strict=True)])


def test_every_byte_and_every_scale(device):
    """All bytes with all scales that are numbers, of both signs; subnormals too."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(16)[None]
    scales = torch.arange(256, dtype=torch.uint8)
    scales[(scales & 0x7F) == 0x7F] = 1
    scales, multipliers = scales.repeat(2)[None], torch.tensor([0.37])
    want = by_hand(packed[0], scales[0], multipliers[0]).float()[None]
    assert torch.equal(nvfp4_decode(packed, scales, multipliers, torch.float32), want)
    got = launch_nvfp4_decode(*(t.to(device) for t in (packed, scales, multipliers)), torch.float32)
    assert torch.equal(got.cpu(), want)


def test_the_scale_is_rounded_before_it_multiplies(dtype, device):
    """The rule by hand: both roundings in float64, of all bytes and scales."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(16)[None]
    scales, multipliers = torch.arange(1, 127, dtype=torch.uint8).repeat(5)[None, :512], torch.tensor([0.0037])
    values = torch.tensor(nvfp4.E2M1)[torch.stack((packed & 15, packed >> 4), -1).flatten().int()]
    scale = scales.view(torch.float8_e4m3fn).float() * multipliers
    once, twice = (each.double()[0].repeat_interleave(16) for each in (scale, scale.to(dtype)))
    want = (values.double() * twice).to(dtype)[None]
    assert torch.equal(nvfp4_decode(packed, scales, multipliers, dtype), want)
    got = launch_nvfp4_decode(*(t.to(device) for t in (packed, scales, multipliers)), dtype)
    assert torch.equal(got.cpu(), want)
    unrounded = (values.double() * once).to(dtype)
    assert torch.equal(want[0], unrounded) == (dtype is torch.float32), "these scales do not tell the rules apart"


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(run, shape, dtype, device, assert_close):
    rows, n, k = shape
    stored = weight_of(n, k)
    x, bias, residual = (torch.randn(size).to(dtype) for size in ((rows, k), (n,), (rows, n)))
    device = torch.device("cpu") if run is nvfp4_linear.cpu else device
    given = [t.to(device) for t in (x, *stored)]
    product = x.double() @ dequantised(*stored).t()
    assert_close(run(*given, None, None), product)
    bare, b, r = run(*given, None, None), bias.to(device), residual.to(device)
    assert torch.equal(run(*given, b, r), (bare + b) + r), "bias and residual are rounded one after the other"


@pytest.mark.parametrize("shape", SHAPES)
def test_both_products_agree_and_rows_stand_alone(shape, dtype, device):
    rows, n, k = shape
    stored = [t.to(device) for t in weight_of(n, k)]
    decoded = launch_nvfp4_decode(*stored, dtype)
    assert torch.equal(decoded.cpu(), nvfp4_decode(*(t.cpu() for t in stored), dtype))
    x = torch.randn(rows, k, device=device).to(dtype)
    packed = launch_nvfp4_linear(x, *stored, None, None)
    tile = None if device.type == "cuda" else STEP
    assert torch.equal(packed, launch_linear(x, decoded, None, None, tile)), "the plain product has other bits"
    assert torch.equal(launch_nvfp4_linear(x[-1:], *stored, None, None), packed[-1:])


@pytest.mark.parametrize("gelu", [False, True])
def test_experts_are_those_of_the_decoded_weights(gelu, device):
    torch.manual_seed(0)
    m, h, i, e, k = 5, 96, 48, 4, 2
    up, down = weight_of(e, 2 * i, h), weight_of(e, h, i)
    ids = choice(m, e, k)
    x = torch.randn(m, h)
    gate = GELU_TANH if gelu else SILU
    sorts = sort_pairs_op.cpu(ids, e, 16)
    twins = {"lead": ExpertPlan(ids, e, 16), "sorted": ExpertPlan(ids, e, 16, *sorts)}
    for name, on in plans(ids.to(device), e, 16).items():
        plan = twins[name]
        want = expert_gate_up(x, nvfp4_decode(*up, torch.float32), plan, None, gate)
        got = expert_nvfp4_gate_up(x, *up, plan, gelu)
        assert torch.equal(got, want)
        assert torch.equal(
            expert_nvfp4_down(got, *down, plan), expert_down(got, nvfp4_decode(*down, torch.float32), plan)
        )
        launched = launch_nvfp4_gate_up(x.to(device), *(t.to(device) for t in up), on, gelu)
        torch.testing.assert_close(launched.cpu(), want, rtol=1e-4, atol=1e-4)
        launched = launch_nvfp4_down(got.to(device), *(t.to(device) for t in down), on)
        torch.testing.assert_close(launched.cpu(), expert_nvfp4_down(got, *down, plan), rtol=1e-4, atol=1e-4)


def test_experts_without_a_gate_are_those_of_the_decoded_weights(dtype, device, assert_close):
    torch.manual_seed(0)
    m, h, i, e, k = 18, 96, 48, 4, 2
    up, ids, x = weight_of(e, i, h), choice(m, e, k), torch.randn(m, h).to(dtype)
    plan = ExpertPlan(ids, e, 16)
    want = expert_up(x, nvfp4_decode(*up, dtype), plan)
    assert torch.equal(expert_nvfp4_up(x, *up, plan), want)
    x, up = x.to(device), [t.to(device) for t in up]
    chosen = [*plans(ids.to(device), e, 16).values(), plans(ids.to(device), e, 32)["sorted"]]
    found = [launch_nvfp4_down(x, *up, each, up=True) for each in chosen]
    assert_close(found[0], want)
    assert all(torch.equal(found[0], each) for each in found)
    alone = launch_nvfp4_down(x[3:4], *up, ExpertPlan(ids[3:4].to(device), e, 16), up=True)
    assert torch.equal(alone, found[0][3 * k : 4 * k])
