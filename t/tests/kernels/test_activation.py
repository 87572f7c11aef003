"""SiLU times up: right against float64, finite for any input, alike in kernel and twin, exact in any batch."""

import pytest
import torch

from unisono.kernels import silu_mul
from unisono.kernels.activation import launch_silu_mul, silu_mul_cpu


@pytest.mark.parametrize("run", [launch_silu_mul, silu_mul_cpu])
@pytest.mark.parametrize("size", [1, 13, 256, 1500])
def test_matches_float64(run, size, dtype, device, assert_close):
    x = torch.randn(5, 2 * size).to("cpu" if run is silu_mul_cpu else device, dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(run(x), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("run", [launch_silu_mul, silu_mul_cpu])
def test_saturates_without_nan(run, device):
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device="cpu" if run is silu_mul_cpu else device)
    out = run(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    assert torch.allclose(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]))


@pytest.mark.parametrize("run", [launch_silu_mul, silu_mul_cpu])
def test_rounds_silu_before_the_product(run, device):
    x = torch.randn(16, 80).to("cpu" if run is silu_mul_cpu else device, torch.float16)
    silu = run(torch.cat((x[:, :40], torch.ones_like(x[:, 40:])), dim=-1))
    assert torch.equal(run(x), silu * x[:, 40:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 13, 128, 333])
def test_twin_rows_are_exact(size, dtype, assert_rows_exact):
    assert_rows_exact(silu_mul_cpu, torch.randn(40, 2 * size).to(dtype))


@pytest.mark.parametrize("size", [13, 1500])
def test_kernel_rows_are_exact(size, dtype, device, assert_rows_exact):
    assert_rows_exact(launch_silu_mul, torch.randn(9, 2 * size).to(device, dtype))


def test_op_dispatches_and_knows_its_shape():
    x = torch.randn(3, 20)
    assert torch.equal(silu_mul(x), silu_mul_cpu(x))
    assert silu_mul(x.to("meta")).shape == (3, 10)
    assert silu_mul(x[:0]).shape == (0, 10)
