"""RMSNorm: right against float64, the Llama rounding order, alike in kernel and twin, exact in any batch."""

import pytest
import torch

from unisono.kernels import rms_norm
from unisono.kernels.norm import launch_rms_norm, rms_norm_cpu

SIZES = [1, 24, 128, 257, 4096]


def inputs(rows, size, dtype, device="cpu"):
    return [torch.randn(shape).to(device, dtype) for shape in ((rows, size), (size,))]


@pytest.mark.parametrize("run", [launch_rms_norm, rms_norm_cpu])
@pytest.mark.parametrize("size", SIZES)
def test_matches_float64(run, size, dtype, device, assert_close):
    x, weight = inputs(5, size, dtype, "cpu" if run is rms_norm_cpu else device)
    wide = x.double()
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_close(run(x, weight, 1e-5), want)


@pytest.mark.parametrize("run", [launch_rms_norm, rms_norm_cpu])
def test_rounds_before_the_weight(run, device):
    """In fp16 1 + 2^-10 times 1 + 2^-10 depends on whether the first factor was rounded."""
    x = torch.randn(64, 96).to("cpu" if run is rms_norm_cpu else device, torch.float16)
    ones, weight = torch.ones_like(x[0]), torch.randn_like(x[0])
    assert torch.equal(run(x, weight, 1e-6), run(x, ones, 1e-6) * weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 128, 257, 4096])
def test_twin_rows_are_exact(size, dtype, assert_rows_exact):
    x, weight = inputs(40, size, dtype)
    assert_rows_exact(lambda x: rms_norm_cpu(x, weight, 1e-6), x)


@pytest.mark.parametrize("size", [24, 257, 4096])
def test_kernel_rows_are_exact(size, dtype, device, assert_rows_exact):
    x, weight = inputs(9, size, dtype, device)
    assert_rows_exact(lambda x: launch_rms_norm(x, weight, 1e-6), x)


def test_op_dispatches_and_knows_its_shape():
    x, weight = inputs(3, 64, torch.float32)
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_cpu(x, weight, 1e-6))
    assert rms_norm(x.to("meta"), weight.to("meta"), 1e-6).shape == (3, 64)
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, 64)
