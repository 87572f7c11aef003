"""What Gemma 4 adds to shared kernels: normed values, values from keys, factors of experts, GELU in their gates."""

import pytest
import torch

from tests.kernels.rope_cases import EPS, PAGE, PAGES, make_case
from unisono.kernels.cache.rotary import launch_rope_and_cache, rope_and_cache
from unisono.kernels.cache.rotary_cpu import rope_and_cache_cpu
from unisono.kernels.gemm.fp8_quantize import quantize
from unisono.kernels.gemm.int4 import unpack_cpu
from unisono.kernels.moe.experts import expert_gate_up, launch_gate_up
from unisono.kernels.moe.fp8 import expert_fp8_gate_up, launch_fp8_gate_up
from unisono.kernels.moe.integers import expert_integer_gate_up, launch_integer_gate_up
from unisono.kernels.moe.plan import plan_experts
from unisono.kernels.moe.router import choose_cpu, launch_choose, route
from unisono.kernels.norm.activation import GELU_TANH

OPS = pytest.mark.parametrize("op", [launch_rope_and_cache, rope_and_cache_cpu])


def run(op, case, qkv, dim, v_norm, k_is_v):
    caches = [qkv.new_empty(PAGES, case.kv_heads, PAGE, dim).fill_(torch.nan) for _ in "kv"]
    q = op(
        qkv.clone(), *case.norms, EPS, case.table, case.positions, case.slots, *caches, case.heads, case.kv_heads,
        v_norm=v_norm, k_is_v=k_is_v,
    )  # fmt: skip
    return q, *caches


@OPS
@pytest.mark.parametrize(("dim", "rot"), [(24, 24), (512, 512), (40, 20)])
def test_values_are_normed_without_a_weight(op, dim, rot, dtype, device, assert_close):
    case = make_case(dim, rot, torch.float32, dtype, "cpu" if op is rope_and_cache_cpu else device)
    q, k, v = run(op, case, case.qkv, dim, True, False)
    plain_q, plain_k, plain_v = run(op, case, case.qkv, dim, False, False)
    assert torch.equal(q, plain_q)
    assert torch.equal(k.nan_to_num(7), plain_k.nan_to_num(7))
    wide = plain_v.double()
    assert_close(v.nan_to_num(0), (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).nan_to_num(0))
    assert not torch.equal(v.nan_to_num(0), plain_v.nan_to_num(0))


@OPS
@pytest.mark.parametrize("v_norm", [False, True])
def test_values_from_keys_are_those_of_a_copied_projection(op, v_norm, dtype, device):
    dim, case = 24, make_case(24, 24, True, dtype, "cpu" if op is rope_and_cache_cpu else device, heads=6, kv_heads=2)
    narrow = case.qkv[:, : 8 * dim].contiguous()  # queries and keys
    copied = torch.cat((narrow, narrow[:, 6 * dim :]), 1)
    for one, other in zip(
        run(op, case, narrow, dim, v_norm, True), run(op, case, copied, dim, v_norm, False), strict=True
    ):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def test_equal_query_and_key_heads_are_not_read_as_gates():
    """2 (Hq + Hkv) heads of one size would be queries with gates."""
    case = make_case(24, 24, True, torch.float32, "cpu", heads=4, kv_heads=4)
    q, _, v = run(rope_and_cache, case, case.qkv[:, : 8 * 24].contiguous(), 24, False, True)
    assert torch.equal(q, run(rope_and_cache, case, case.qkv, 24, False, False)[0])
    assert v.isfinite().any()


@pytest.mark.parametrize("choose", [launch_choose, choose_cpu])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_router_factors_apply_after_normalisation(choose, kind, device):
    device = torch.device("cpu") if choose is choose_cpu else device
    logits, factors = torch.randn(9, 13).to(device), torch.randn(13).to(device, kind)
    positions = torch.tensor([0, 1, -1, 3, 4, 5, 6, -1, 8], dtype=torch.int32, device=device)
    ids, weights, _ = choose(logits, positions, None, 13, 4, True, factors)
    plain_ids, plain, _ = choose(logits, positions, None, 13, 4, True)
    assert torch.equal(ids, plain_ids)
    real = positions >= 0
    assert torch.equal(weights[real], plain[real] * factors.float()[ids[real].long()])
    assert (weights[~real] == 0).all()


def test_route_passes_expert_factors():
    x, weight, factors = torch.randn(5, 24), torch.randn(7, 24), torch.rand(7)
    with_factors = route(x, weight, None, None, 7, 3, True, None, factors)
    plain = route(x, weight, None, None, 7, 3, True)
    assert torch.equal(with_factors[1], plain[1] * factors[plain[0].long()])


def test_experts_gate_with_gelu(dtype, device, assert_close):
    rows, hidden, inner, experts, top_k = 9, 40, 24, 5, 2
    x = torch.randn(rows, hidden).to(device, dtype)
    weight = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(device, dtype)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).int().to(device)
    h = launch_gate_up(x, weight, plan_experts(ids, experts, 16), gate=GELU_TANH)
    chosen = weight.double()[ids.flatten().long()]
    gate, up = (chosen @ x.double().repeat_interleave(top_k, 0)[..., None])[..., 0].chunk(2, dim=-1)
    want = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert_close(h, want)
    twin = expert_gate_up(x.cpu(), weight.cpu(), plan_experts(ids.cpu(), experts, 16), gate=GELU_TANH)
    assert_close(twin.to(device), want)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_quantised_experts_gate_with_gelu(kind, device, assert_close):
    """The kernel against its twin, and the twin against float64 on the dequantised weights."""
    rows, hidden, inner, experts, top_k = 9, 128, 32, 5, 2
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, hidden, generator=generator).half()
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)]).int()
    if kind == "fp8":
        weight = torch.randn(experts, 2 * inner, hidden, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(experts, 2 * inner, generator=generator) / 16
        operands, launch, twin = (weight, scales), launch_fp8_gate_up, expert_fp8_gate_up
        read = quantize(x, 0)
        wide = weight.double() * scales[..., None]
        read_rows = read.x8[:rows].double() * read.scales.view(-1)[:rows, None]
    else:
        packed = torch.randint(0, 256, (experts, 2 * inner, hidden // 2), generator=generator, dtype=torch.uint8)
        scales = torch.rand(experts, 2 * inner, hidden // 32, generator=generator) / 16
        operands, launch, twin = (packed, scales, None, 32), launch_integer_gate_up, expert_integer_gate_up
        wide = torch.stack([unpack_cpu(packed[e], scales[e], None, 32, torch.float16) for e in range(experts)]).double()
        read_rows = x.double()
    there = [t.to(device) if isinstance(t, torch.Tensor) else t for t in operands]
    h = twin(x, *operands, plan_experts(ids, experts, 16), gelu=True)
    launched = launch(x.to(device), *there, plan_experts(ids.to(device), experts, 16), gelu=True)
    chosen = wide[ids.flatten().long()]
    gate, up = (chosen @ read_rows.repeat_interleave(top_k, 0)[..., None])[..., 0].chunk(2, dim=-1)
    want = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert_close(h, want)
    assert_close(launched.cpu(), want)
    assert not torch.allclose(h, twin(x, *operands, plan_experts(ids, experts, 16)), atol=0.05)
