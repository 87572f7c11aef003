"""An fp8 product, a sum and a norm in one op: the bits of the three one after the other, whatever multiplies."""

import importlib
import itertools

import pytest
import torch

from unisono.kernels.gemm.fp8 import fp8_linear, fp8_linear_cuda, launch_fp8_product
from unisono.kernels.gemm.fp8_linear_norm import fp8_linear_norm, fp8_linear_norm_cuda, fp8_linear_norm_op
from unisono.kernels.gemm.fp8_quantize import Quantised, launch_quantize, quantize
from unisono.kernels.norm.rms_norm import launch_rms_norm, rms_norm

FP8 = importlib.import_module("unisono.kernels.gemm.fp8")


def operands(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, weight, scales of blocks, bias, residual, norm_weight of 40 outputs and 200 inputs."""
    x, bias, residual, norm = (
        torch.randn(shape).to(device, dtype) for shape in ((rows, 200), (40,), (rows, 40), (40,))
    )
    weight = (torch.randn(40, 200) * 50).to(torch.float8_e4m3fn).to(device)
    return x, weight, torch.rand(1, 2).add(0.5).mul(1e-2).to(device), bias, residual, norm


def by_triton(x8, x_scales, weight, w_scales, dtype):
    """In place of torch's product, which needs a GPU."""
    return launch_fp8_product(x8, x_scales, weight, w_scales, None, None, x8.shape[0], dtype)


@pytest.mark.parametrize(
    ("rows", "bias"),
    [
        pytest.param(*cell, marks=() if cell in ((1, True), (9, False), (70, True)) else pytest.mark.full)
        for cell in itertools.product((1, 9, 70), (False, True))
    ],
)
def test_both_ways_to_multiply_give_the_same_bits(rows, bias, dtype, device, monkeypatch):
    x, weight, scales, b, residual, norm = operands(rows, dtype, device)
    b = b if bias else None
    want = fp8_linear_cuda(x, weight, scales, None, b, residual)
    normed = launch_rms_norm(want, norm, 1e-6)
    for torchs in (False, True):
        monkeypatch.setattr(FP8, "runs_on_torch", lambda *_, torchs=torchs: torchs)
        monkeypatch.setattr(FP8, "_scaled_mm", by_triton)
        for group, keep in ((None, True), (128, True), (128, False), (0, True)):
            given = *launch_quantize(x, 128), weight, scales, b, residual, norm, 1e-6, group, keep
            total, got, x8, x_scales = fp8_linear_norm_cuda(*given)
            assert torch.equal(total, want)
            assert not keep or torch.equal(got, normed)
            if group is not None:
                for ours, theirs in zip((x8, x_scales), launch_quantize(normed, group or None), strict=True):
                    assert torch.equal(ours.float(), theirs.float())


def test_op_dispatches_and_knows_its_shape(dtype):
    x, weight, scales, b, residual, norm = operands(3, dtype, torch.device("cpu"))
    q = quantize(x, 128)
    total, normed = fp8_linear_norm(q, weight, scales, b, residual, norm, 1e-6)
    want = fp8_linear_norm_op.cpu(q.x8, q.scales, weight, scales, b, residual, norm, 1e-6, None, True)
    assert torch.equal(total, want[0])
    assert torch.equal(normed, want[1])
    assert torch.equal(total, fp8_linear(x, weight, scales, None, b, residual))
    for group, keep in ((128, True), (0, False)):
        total, normed = fp8_linear_norm(q, weight, scales, b, residual, norm, 1e-6, group, keep)
        again = quantize(rms_norm.cpu(total, norm, 1e-6), group)
        assert torch.equal(normed.x8.float(), again.x8.float())
        assert torch.equal(normed.scales, again.scales)
        assert (normed.x is not None) == keep
        meta = [t.to("meta") for t in (weight, scales, b, residual, norm)]
        shapes = fp8_linear_norm(
            Quantised(q.x8.to("meta"), q.scales.to("meta"), 128, 3, dtype), *meta, 1e-6, group, keep
        )
        assert shapes[0].shape == total.shape
        assert [shapes[1].x8.shape, shapes[1].scales.shape] == [normed.x8.shape, normed.scales.shape]
