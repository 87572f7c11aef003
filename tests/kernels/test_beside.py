"""Kernels around a dense MLP beside experts: the bits of the ops in turn, right against float64, exact in any batch."""

import pytest
import torch

from unisono.kernels.gemm.fp8_quantize import quantised_cpu
from unisono.kernels.moe.beside import beside_norms, beside_sum, launch_beside_norms, launch_beside_sum
from unisono.kernels.moe.combine import combine_experts, launch_combine
from unisono.kernels.norm.rms_norm import launch_rms_norm, rms_norm

EPS, AFTER_EPS, NORM_EPS = 1e-3, 1e-4, 1e-5
NORMS = pytest.mark.parametrize("run", [launch_beside_norms, beside_norms.cpu])
SUMS = pytest.mark.parametrize("run", [launch_beside_sum, beside_sum.cpu])
SIZES = pytest.mark.parametrize("size", [24, 257])
KINDS = pytest.mark.parametrize("kind", [torch.float16, torch.float32])


def place(run, device):
    """(device, rms_norm there) of a kernel or of its twin."""
    cpu = run in (beside_norms.cpu, beside_sum.cpu)
    return ("cpu", rms_norm.cpu) if cpu else (device, launch_rms_norm)


def norm_inputs(rows, size, dtype, device, kind=None):
    x, residual = (torch.randn(rows, size).to(device, dtype) for _ in range(2))
    after, *weights = (torch.randn(size).to(device, kind or dtype) for _ in range(4))
    return x, residual, after, AFTER_EPS, *weights, EPS


def sum_inputs(rows, size, dtype, device, kind=None, scaled=True, top_k=3):
    y = torch.randn(rows * top_k, size).to(device, dtype)
    weights = torch.rand(rows, top_k, device=device)
    weights[-1, 1] = 0  # of a pair without an expert, whose row was never written
    y[rows * top_k - 2] = torch.nan
    dense, residual = (torch.randn(rows, size).to(device, dtype) for _ in range(2))
    dense_after, sparse_after, after, weight = (torch.randn(size).to(device, kind or dtype) for _ in range(4))
    factor = torch.tensor([0.37]).to(device, dtype) if scaled else None
    return y, weights, dense, residual, dense_after, sparse_after, EPS, after, AFTER_EPS, factor, weight, NORM_EPS


def wide_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@NORMS
@SIZES
def test_norms_match_float64(run, size, dtype, device, assert_close):
    x, residual, after, _, *weights, _ = inputs = norm_inputs(5, size, dtype, place(run, device)[0])
    made = run(*inputs)
    assert_close(made[0], residual.double() + wide_norm(x.double(), after, AFTER_EPS))
    for found, weight in zip((made[1], made[4], made[7]), weights, strict=True):
        assert_close(found, wide_norm(made[0].double(), weight, EPS))


@NORMS
@KINDS
def test_norms_have_the_bits_of_the_ops_in_turn(run, kind, device):
    device, norm = place(run, device)
    x, residual, after, _, *weights, _ = inputs = norm_inputs(7, 96, torch.float16, device, kind)
    made = run(*inputs)
    assert torch.equal(made[0], norm(x, after, AFTER_EPS) + residual)
    for found, weight in zip((made[1], made[4], made[7]), weights, strict=True):
        assert torch.equal(found, norm(made[0], weight, EPS))


@NORMS
@pytest.mark.parametrize(("dense", "sparse"), [(128, 128), (None, 0), (128, None)])
def test_norms_quantise_for_their_consumers(run, dense, sparse, device):
    inputs = norm_inputs(5, 256, torch.float16, place(run, device)[0])
    plain, made = run(*inputs), run(*inputs, dense, False, sparse, True)
    assert torch.equal(made[0], plain[0])
    assert torch.equal(made[7], plain[7])
    assert torch.equal(made[4], plain[4])
    assert made[1].numel() == (0 if dense else plain[1].numel()) or dense is None
    for group, norm, at in ((dense, plain[1], 2), (sparse, plain[4], 5)):
        want8, want_scales = quantised_cpu(norm.cpu(), group)
        assert torch.equal(made[at].view(torch.uint8).cpu(), want8.view(torch.uint8))
        assert torch.equal(made[at + 1].cpu(), want_scales)


@SUMS
@SIZES
@pytest.mark.parametrize("scaled", [False, True])
def test_sum_matches_float64(run, size, scaled, dtype, device, assert_close):
    inputs = sum_inputs(5, size, dtype, place(run, device)[0], scaled=scaled)
    y, weights, dense, residual, dense_after, sparse_after, _, after, _, factor, weight, _ = inputs
    parts = torch.where(weights[..., None] != 0, y.view(5, 3, size), 0).double() * weights.double()[..., None]
    both = wide_norm(parts.sum(1), sparse_after, EPS) + wide_norm(dense.double(), dense_after, EPS)
    want = residual.double() + wide_norm(both, after, AFTER_EPS)
    total, normed, *_ = run(*inputs)
    assert_close(total, want if factor is None else want * factor.double())
    assert_close(normed, wide_norm(total.double(), weight, NORM_EPS))


@SUMS
@KINDS
@pytest.mark.parametrize("scaled", [False, True])
def test_sum_has_the_bits_of_the_ops_in_turn(run, kind, scaled, device):
    device, norm = place(run, device)
    inputs = sum_inputs(7, 96, torch.float16, device, kind, scaled)
    y, weights, dense, residual, dense_after, sparse_after, _, after, _, factor, weight, _ = inputs
    nothing = torch.zeros_like(residual)
    if device == "cpu":
        mixed = combine_experts(y, weights, None, None, nothing)
    else:
        mixed = launch_combine(y, weights, None, None, nothing, None, 0.0)[0]
    total = norm(norm(mixed, sparse_after, EPS) + norm(dense, dense_after, EPS), after, AFTER_EPS) + residual
    total = total if factor is None else total * factor
    found, normed, *_ = run(*inputs)
    assert torch.equal(found, total)
    assert torch.equal(normed, norm(total, weight, NORM_EPS))
    alone, empty, *_ = run(*inputs[:10], None, 0.0)
    assert torch.equal(alone, total)
    assert empty.numel() == 0


@SUMS
def test_sum_quantises_its_norm(run, device):
    inputs = sum_inputs(5, 256, torch.float16, place(run, device)[0])
    plain_total, plain, *_ = run(*inputs)
    total, kept, x8, scales = run(*inputs, 128, False)
    assert torch.equal(total, plain_total)
    assert kept.numel() == 0
    want8, want_scales = quantised_cpu(plain.cpu(), 128)
    assert torch.equal(x8.view(torch.uint8).cpu(), want8.view(torch.uint8))
    assert torch.equal(scales.cpu(), want_scales)


@NORMS
def test_rows_of_norms_are_exact(run, dtype, device, assert_rows_exact):
    x, residual, *rest = norm_inputs(9, 257, dtype, place(run, device)[0])
    assert_rows_exact(lambda a, b: torch.cat([run(a, b, *rest)[i] for i in (0, 1, 4, 7)], dim=1), x, residual)


@SUMS
def test_rows_of_sums_are_exact(run, dtype, device, assert_rows_exact):
    y, weights, dense, residual, *rest = sum_inputs(9, 257, dtype, place(run, device)[0])
    tokens = y.view(9, -1)
    assert_rows_exact(
        lambda t, w, d, r: torch.cat(run(t.reshape(-1, 257), w, d, r, *rest)[:2], dim=1),
        tokens, weights, dense, residual,
    )  # fmt: skip


def test_ops_dispatch_and_know_their_shapes():
    norms, sums = norm_inputs(3, 128, torch.bfloat16, "cpu"), sum_inputs(3, 128, torch.bfloat16, "cpu")
    for op, inputs in ((beside_norms, norms), (beside_sum, sums)):
        found = op(*inputs)
        assert all(torch.equal(one, other) for one, other in zip(found, op.cpu(*inputs), strict=True))
        on_meta = op(*[t.to("meta") if isinstance(t, torch.Tensor) else t for t in inputs])
        assert [t.shape for t in on_meta] == [t.shape for t in found]
