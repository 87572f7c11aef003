"""The linear op: right against float64, alike in kernel and twin, the same bits in any batch and tile."""

import importlib

import pytest
import torch

from unisono.kernels import exact_blas, linear
from unisono.kernels.gemm.linear import launch_add, launch_linear
from unisono.kernels.gemm.tile import Tile

kernel = importlib.import_module("unisono.kernels.gemm.linear")  # the package's attribute of that name is the function

SHAPES = [(1, 48, 64), (5, 33, 100), (16, 64, 256), (37, 70, 257), (65, 130, 300)]  # M, N, K


def inputs(rows, n, k, dtype, device="cpu"):
    """x, weight, bias and residual, drawn in float32 and rounded."""
    shapes = ((rows, k), (n, k), (n,), (rows, n))
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("run", [launch_linear, linear.cpu])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(run, shape, dtype, device, assert_close):
    x, weight, bias, residual = inputs(*shape, dtype, "cpu" if run is linear.cpu else device)
    product = x.double() @ weight.double().t()
    assert_close(run(x, weight, None, None), product)
    assert_close(run(x, weight, bias, None), product + bias)
    assert_close(run(x, weight, None, residual), product + residual)
    assert_close(run(x, weight, bias, residual), product + bias + residual)


@pytest.mark.parametrize("run", [launch_linear, linear.cpu])
def test_fused_epilogue_rounds_like_the_unfused_path(run, dtype, device):
    x, weight, bias, residual = inputs(9, 50, 120, dtype, "cpu" if run is linear.cpu else device)
    bare = run(x, weight, None, None)
    assert torch.equal(run(x, weight, bias, residual), (bare + bias) + residual)
    if run is launch_linear:
        assert torch.equal(launch_add(bare.clone(), bias, residual), (bare + bias) + residual)
        assert torch.equal(launch_add(bare.clone(), None, residual), bare + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (33, 100), (7, 1), (257, 515)])
def test_twin_rows_are_exact(n, k, dtype, assert_rows_exact):
    x, weight, bias, residual = inputs(40, n, k, dtype)
    assert_rows_exact(lambda x, residual: linear.cpu(x, weight, bias, residual), x, residual)


def test_twin_ignores_strides_and_alignment():
    x, weight, *_ = inputs(20, 33, 37, torch.float32)
    want = linear.cpu(x, weight, None, None)
    shifted = torch.empty(20 * 37 + 1)[1:].view(20, 37).copy_(x)
    wide = torch.empty(20, 50)[:, 5:42].copy_(x)
    for same in (shifted, wide):
        assert torch.equal(linear.cpu(same, weight, None, None), want)
        assert torch.equal(linear.cpu(same[3:19], weight, None, None), want[3:19])


@pytest.mark.parametrize(("n", "k"), [(64, 256), (33, 300)])
def test_kernel_rows_are_exact(n, k, dtype, device, assert_rows_exact):
    x, weight, bias, residual = inputs(20 if device.type == "cuda" else 12, n, k, dtype, device)
    assert_rows_exact(lambda x, residual: launch_linear(x, weight, bias, residual), x, residual)


@pytest.mark.parametrize("k", [256, 257])
@pytest.mark.parametrize("rows", [5, 20])
def test_the_weight_as_left_operand_changes_no_bit(rows, k, dtype, device, assert_close):
    x, weight, bias, residual = inputs(rows, 70, k, dtype, device)
    want = launch_linear(x, weight, bias, residual, Tile(16, 32, 64, 4, 2))
    for tile in (Tile(16, 64, 64, 4, 3, swapped=True), Tile(32, 64, 64, 4, 3, swapped=True)):
        assert torch.equal(launch_linear(x, weight, bias, residual, tile), want)
    assert_close(want, x.double() @ weight.double().t() + bias + residual)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter multiplies with the CPU's BLAS")
def test_tile_and_backend_do_not_change_bits(dtype, device):
    x, weight, bias, residual = inputs(600, 200, 1000, dtype, device)
    want = launch_linear(x, weight, bias, residual)
    for tile in (
        Tile(16, 32, 256, 4, 2), Tile(16, 64, 64, 4, 4), Tile(64, 128, 32, 8, 2), Tile(32, 64, 128, 4, 4, swapped=True),
    ):  # fmt: skip
        assert torch.equal(launch_linear(x, weight, bias, residual, tile), want)
    assert exact_blas.prove(weight)
    for rows in (1, 2, 15, 16, 17, 30, 32, 64, 256, 257, 600):
        assert torch.equal(linear(x[:rows], weight, bias, residual[:rows]), want[:rows])


def test_a_reduction_chosen_by_the_batch_is_caught(assert_rows_exact):
    """The negative control: split-K for few rows, as BLAS libraries do, must fail the check above."""
    x, weight, *_ = inputs(24, 48, 500, torch.float32)

    def split_k(x):
        if x.shape[0] > 4:
            return linear.cpu(x, weight, None, None)
        parts = [linear.cpu(x[:, i : i + 100], weight[:, i : i + 100], None, None) for i in range(0, 500, 100)]
        return torch.stack(parts).sum(0)

    with pytest.raises(AssertionError, match="bits change"):
        assert_rows_exact(split_k, x)


def test_op_dispatches_and_knows_its_shape():
    x, weight, bias, residual = inputs(3, 10, 20, torch.float32)
    assert torch.equal(linear(x, weight, bias, residual), linear.cpu(x, weight, bias, residual))
    assert linear(x[:0], weight).shape == (0, 10)
    assert linear(x.to("meta"), weight.to("meta")).shape == (3, 10)
    assert exact_blas.prove(weight)
