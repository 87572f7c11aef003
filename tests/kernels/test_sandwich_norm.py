"""Norms of outputs before they are added, GELU gates and soft caps: right against float64, exact in any batch."""

import pytest
import torch

from unisono.kernels.gemm.fp8_quantize import quantised_cpu
from unisono.kernels.norm import activation
from unisono.kernels.norm.activation import GELU_TANH, gated_cpu, gelu_mul, gelu_mul_fp8, launch_gelu_mul
from unisono.kernels.norm.add_norm import add_rms_norm
from unisono.kernels.norm.rms_norm import launch_rms_norm, rms_norm
from unisono.kernels.norm.sandwich_norm import add_normed, add_normed_fp8, add_normed_op, launch_add_normed
from unisono.kernels.sampling import soft_cap

RUNS = pytest.mark.parametrize("run", [launch_add_normed, add_normed_op.cpu])


def inputs(rows, size, dtype, device, kind=None, scaled=True):
    x, residual = (torch.randn(rows, size).to(device, dtype) for _ in range(2))
    after, weight = (torch.randn(size).to(device, kind or dtype) for _ in range(2))
    factor = torch.tensor([0.37]).to(device, dtype) if scaled else None
    return x, residual, after, 1e-3, factor, weight, 1e-5


@RUNS
@pytest.mark.parametrize("size", [1, 24, 257, 4096])
@pytest.mark.parametrize("scaled", [False, True])
def test_matches_float64(run, size, scaled, dtype, device, assert_close):
    device = "cpu" if run is add_normed_op.cpu else device
    x, residual, after, after_eps, factor, weight, eps = arguments = inputs(5, size, dtype, device, scaled=scaled)
    wide = x.double()
    want = residual.double() + wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + after_eps) * after.double()
    want = want if factor is None else want * factor.double()
    total, normed, *_ = run(*arguments)
    assert_close(total, want)
    of = total.double()
    assert_close(normed, of * torch.rsqrt(of.square().mean(-1, keepdim=True) + eps) * weight.double())


@RUNS
@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
@pytest.mark.parametrize("scaled", [False, True])
def test_bits_are_those_of_the_ops_in_turn(run, kind, scaled, device):
    """Each step rounds: the norm of the output, the sum, the product, the norm of that."""
    device, norm = ("cpu", rms_norm.cpu) if run is add_normed_op.cpu else (device, launch_rms_norm)
    x, residual, after, after_eps, factor, weight, eps = arguments = inputs(33, 96, torch.float16, device, kind, scaled)
    total = norm(x, after, after_eps) + residual
    total = total if factor is None else total * factor
    found, normed, *_ = run(*arguments)
    assert torch.equal(found, total)
    assert torch.equal(normed, norm(total, weight, eps))
    alone, nothing, *_ = run(*arguments[:5], None, 0.0)
    assert torch.equal(alone, total)
    assert nothing.numel() == 0


@RUNS
@pytest.mark.parametrize("size", [7, 257])
def test_rows_are_exact(run, size, dtype, device, assert_rows_exact):
    device = "cpu" if run is add_normed_op.cpu else device
    x, residual, *rest = inputs(9, size, dtype, device)
    both = torch.cat((x, residual), dim=1)
    assert_rows_exact(lambda rows: torch.cat(run(*rows.chunk(2, dim=1), *rest)[:2], dim=1), both)


@pytest.mark.parametrize("group", [128, 0])
def test_fused_quantisation_equals_quantised_output(group, device):
    arguments = inputs(5, 256, torch.float16, device)
    total, normed, x8, scales = launch_add_normed(*arguments, group, True)
    plain_total, plain, *_ = launch_add_normed(*arguments)
    assert torch.equal(total, plain_total)
    assert torch.equal(normed, plain)
    want8, want_scales = quantised_cpu(plain.cpu(), group)
    assert torch.equal(x8[:5].view(torch.uint8).cpu(), want8[:5].view(torch.uint8))
    assert torch.equal(scales[:, :5].cpu(), want_scales[:, :5])


def test_op_dispatches_and_knows_its_shapes():
    arguments = inputs(3, 128, torch.bfloat16, "cpu")
    total, normed = add_normed(*arguments)
    assert torch.equal(total, add_normed_op.cpu(*arguments)[0])
    assert torch.equal(normed, add_normed_op.cpu(*arguments)[1])
    sum_alone, again = add_normed(*arguments[:5], None, 0.0)
    assert sum_alone is again
    _, quantised = add_normed_fp8(*arguments, 128, False)
    assert quantised.group == 128
    on_meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in arguments]
    assert [tuple(t.shape) for t in add_normed(*on_meta)] == [(3, 128), (3, 128)]
    x, residual, after, after_eps, _, weight, eps = arguments
    ordinary = add_rms_norm(rms_norm.cpu(x, after, after_eps), residual, weight, eps)
    assert torch.equal(add_normed(*arguments[:4], None, *arguments[5:])[1], ordinary[1])


# ---- GELU by tanh -----------------------------------------------------------------------------------

GELUS = pytest.mark.parametrize("run", [launch_gelu_mul, gelu_mul.cpu])


@GELUS
@pytest.mark.parametrize("size", [1, 13, 1500])
def test_gelu_matches_float64(run, size, dtype, device, assert_close):
    x = (3 * torch.randn(5, 2 * size)).to("cpu" if run is gelu_mul.cpu else device, dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(run(x), torch.nn.functional.gelu(gate, approximate="tanh") * up)


@GELUS
def test_gelu_saturates_without_nan(run, device):
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device="cpu" if run is gelu_mul.cpu else device)
    out = run(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    assert torch.allclose(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]))


@GELUS
@pytest.mark.parametrize("size", [13, 333])
def test_gelu_rows_are_exact(run, size, dtype, device, assert_rows_exact):
    assert_rows_exact(run, torch.randn(9, 2 * size).to("cpu" if run is gelu_mul.cpu else device, dtype))


def test_gelu_fused_quantisation_equals_quantised_output(device):
    x = torch.randn(5, 512).to(device, torch.float16)
    for group in (128, 0):
        x8, scales = activation.launch_silu_mul_fp8(x, group, gelu=True)
        want8, want_scales = quantised_cpu(launch_gelu_mul(x).cpu(), group)
        assert torch.equal(x8[:5].view(torch.uint8).cpu(), want8[:5].view(torch.uint8))
        assert torch.equal(scales[:, :5].cpu(), want_scales[:, :5])


@pytest.mark.parametrize("gelu", [False, True])
def test_gates_of_rows_of_any_stride_are_those_of_halves(gelu, dtype, device):
    """An input of a layer is a slice of those of all."""
    x, others = torch.randn(5, 260).to(device, dtype), torch.randn(5, 3, 260).to(device, dtype)
    whole = torch.cat((x, others[:, 1]), 1)
    want = (launch_gelu_mul if gelu else activation.launch_silu_mul)(whole)
    assert torch.equal(activation.launch_gate_rows(x, others[:, 1], gelu), want)
    for found, expected in zip(
        activation.launch_gate_rows_fp8(x, others[:, 1], gelu, 128),
        activation.launch_silu_mul_fp8(whole, 128, gelu),
        strict=True,
    ):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    own, twin = (t.cpu() for t in (x, others[:, 1])), (gelu_mul if gelu else activation.silu_mul).cpu(whole.cpu())
    assert torch.equal(activation.gate_rows(*own, gelu), twin)


def test_gelu_ops_dispatch():
    x = torch.randn(3, 256)
    assert torch.equal(gelu_mul(x), gelu_mul.cpu(x))
    assert torch.equal(gated_cpu(x, None, *GELU_TANH), gelu_mul.cpu(x))
    assert gelu_mul(x.to("meta")).shape == (3, 128)
    assert gelu_mul_fp8(x, 128).group == 128
    assert torch.allclose(gelu_mul(x.requires_grad_()).detach(), gelu_mul.cpu(x.detach()), atol=1e-6)


# ---- soft caps --------------------------------------------------------------------------------------

CAPS = pytest.mark.parametrize("run", [soft_cap.launch_soft_cap, soft_cap.soft_cap.cpu])


@CAPS
def test_cap_matches_float64(run, dtype, device, assert_close):
    x = (40 * torch.randn(5, 333)).to("cpu" if run is soft_cap.soft_cap.cpu else device, dtype)
    assert_close(run(x, 30.0), 30 * torch.tanh(x.double() / 30))


@CAPS
def test_cap_keeps_the_order_and_rows(run, dtype, device, assert_rows_exact):
    x = (20 * torch.randn(9, 333)).to("cpu" if run is soft_cap.soft_cap.cpu else device, dtype).sort().values
    capped = run(x, 30.0).float()
    assert (capped.diff(dim=1) >= 0).all()
    assert_rows_exact(lambda rows: run(rows, 30.0), x)


def test_cap_dispatches():
    x = torch.randn(3, 7)
    assert torch.equal(soft_cap.soft_cap(x, 2.0), soft_cap.soft_cap.cpu(x, 2.0))
    assert soft_cap.soft_cap(x.to("meta"), 2.0).shape == (3, 7)
