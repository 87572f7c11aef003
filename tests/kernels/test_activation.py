"""SiLU times up, and sigmoid gates: right against float64, alike in kernel and twin, exact in any batch."""

import pytest
import torch

from unisono.kernels.norm.activation import (
    launch_relu_squared,
    launch_sigmoid_gate,
    launch_silu_mul,
    relu_squared,
    sigmoid_gate,
    silu_mul,
)


@pytest.mark.parametrize("run", [launch_silu_mul, silu_mul.cpu])
@pytest.mark.parametrize("size", [1, 13, 256, 1500])
def test_matches_float64(run, size, dtype, device, assert_close):
    x = torch.randn(5, 2 * size).to("cpu" if run is silu_mul.cpu else device, dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(run(x), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("run", [launch_silu_mul, silu_mul.cpu])
def test_saturates_without_nan(run, device):
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device="cpu" if run is silu_mul.cpu else device)
    out = run(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    assert torch.allclose(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]))


@pytest.mark.parametrize("run", [launch_silu_mul, silu_mul.cpu])
def test_rounds_silu_before_the_product(run, device):
    x = torch.randn(16, 80).to("cpu" if run is silu_mul.cpu else device, torch.float16)
    silu = run(torch.cat((x[:, :40], torch.ones_like(x[:, 40:])), dim=-1))
    assert torch.equal(run(x), silu * x[:, 40:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 13, 128, 333])
def test_twin_rows_are_exact(size, dtype, assert_rows_exact):
    assert_rows_exact(silu_mul.cpu, torch.randn(40, 2 * size).to(dtype))


@pytest.mark.parametrize("size", [13, 1500])
def test_kernel_rows_are_exact(size, dtype, device, assert_rows_exact):
    assert_rows_exact(launch_silu_mul, torch.randn(9, 2 * size).to(device, dtype))


def test_op_dispatches_and_knows_its_shape():
    x = torch.randn(3, 20)
    assert torch.equal(silu_mul(x), silu_mul.cpu(x))
    assert silu_mul(x.to("meta")).shape == (3, 10)
    assert silu_mul(x[:0]).shape == (0, 10)


@pytest.mark.parametrize("run", [launch_relu_squared, relu_squared.cpu])
def test_squares_what_is_above_zero(run, dtype, device):
    """In rows of a stride, too; rounded once."""
    x = torch.randn(7, 2 * 333).to("cpu" if run is relu_squared.cpu else device, dtype)[:, :333]
    x[0, :3] = torch.tensor([0.0, -0.0, torch.nan])
    want = torch.where(x.float() < 0, 0, x.float()).square().to(dtype)
    assert torch.equal(run(x).nan_to_num(7), want.nan_to_num(7))
    assert relu_squared(x.to("meta")).shape == x.shape


@pytest.mark.parametrize("run", [launch_sigmoid_gate, sigmoid_gate.cpu])
@pytest.mark.parametrize(("heads", "dim"), [(1, 6), (3, 24), (16, 256)])
def test_gates_match_float64(run, heads, dim, dtype, device, assert_close):
    """A row holds more than queries and gates, and is part of a longer one."""
    device = "cpu" if run is sigmoid_gate.cpu else device
    x, rows = torch.randn(5, heads * dim).to(device, dtype), torch.randn(5, 2 * heads * dim + 20).to(device, dtype)
    gate = rows[:, : 2 * heads * dim].double().view(5, heads, 2, dim)[:, :, 1].flatten(1)
    assert_close(run(x, rows[:, :-7], heads), x.double() * torch.sigmoid(gate))


@pytest.mark.parametrize("run", [launch_sigmoid_gate, sigmoid_gate.cpu])
def test_gates_are_exact_in_any_batch(run, dtype, device, assert_rows_exact):
    both = torch.randn(40, 3 * 39).to("cpu" if run is sigmoid_gate.cpu else device, dtype)
    assert_rows_exact(lambda rows: run(rows[:, :39], rows[:, 39:], 3), both)


def test_the_gates_op_dispatches():
    x, qkv = torch.randn(3, 20), torch.randn(3, 50)
    assert torch.equal(sigmoid_gate(x, qkv, 2), sigmoid_gate.cpu(x, qkv, 2))
    assert sigmoid_gate(x.to("meta"), qkv.to("meta"), 2).shape == x.shape
