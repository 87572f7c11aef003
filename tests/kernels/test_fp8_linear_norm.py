"""An fp8 product, a sum and a norm in one op: the bits of the three one after the other, whatever multiplies."""

import importlib

import pytest
import torch

from unisono.kernels.fp8 import fp8_linear_cuda, launch_fp8_product
from unisono.kernels.fp8_linear_norm import fp8_linear_norm, fp8_linear_norm_cpu, fp8_linear_norm_cuda
from unisono.kernels.norm import launch_rms_norm

FP8 = importlib.import_module("unisono.kernels.fp8")
MODULE = importlib.import_module("unisono.kernels.fp8_linear_norm")


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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_both_ways_to_multiply_give_the_same_bits(rows, bias, dtype, device, monkeypatch):
    x, weight, scales, b, residual, norm = operands(rows, dtype, device)
    b = b if bias else None
    want = fp8_linear_cuda(x, weight, scales, None, b, residual)
    for torchs in (False, True):
        monkeypatch.setattr(MODULE, "runs_on_torch", lambda *_, torchs=torchs: torchs)
        monkeypatch.setattr(FP8, "_scaled_mm", by_triton)
        total, normed = fp8_linear_norm_cuda(x, weight, scales, None, b, residual, norm, 1e-6)
        assert torch.equal(total, want)
        assert torch.equal(normed, launch_rms_norm(want, norm, 1e-6))


def test_op_dispatches_and_knows_its_shape(dtype):
    x, weight, scales, b, residual, norm = operands(3, dtype, torch.device("cpu"))
    total, normed = fp8_linear_norm(x, weight, scales, None, b, residual, norm, 1e-6)
    want = fp8_linear_norm_cpu(x, weight, scales, None, b, residual, norm, 1e-6)
    assert torch.equal(total, want[0])
    assert torch.equal(normed, want[1])
    meta = [t.to("meta") for t in (x, weight, scales, b, residual, norm)]
    shapes = fp8_linear_norm(*meta[:3], None, *meta[3:], 1e-6)
    assert [tuple(t.shape) for t in shapes] == [(3, 40), (3, 40)]
