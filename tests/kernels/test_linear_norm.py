"""A product, a sum and a norm in one op: the bits of the three one after the other, whoever computes the product."""

import importlib

import pytest
import torch

from unisono.kernels import linear, linear_norm, rms_norm
from unisono.kernels.gemm.linear import launch_linear
from unisono.kernels.gemm.linear_norm import linear_norm_cpu, linear_norm_cuda
from unisono.kernels.norm.rms_norm import launch_add_rms_norm, launch_rms_norm

MODULE = importlib.import_module("unisono.kernels.gemm.linear_norm")  # the package has a function of that name


def inputs(rows, n, k, dtype, device):
    shapes = ((rows, k), (n, k), (n,), (rows, n), (n,))
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("size", [1, 24, 257, 4096])
def test_adding_in_the_norm_gives_the_bits_of_adding_before_it(size, dtype, device):
    x, residual, weight = (torch.randn(shape).to(device, dtype) for shape in ((5, size), (5, size), (size,)))
    total, normed = launch_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, launch_rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_both_ways_to_multiply_give_the_same_bits(rows, bias, dtype, device, monkeypatch):
    x, weight, b, residual, norm_weight = inputs(rows, 48, 80, dtype, device)
    b = b if bias else None
    want = launch_linear(x, weight, b, residual)
    for blas in (False, True):
        monkeypatch.setattr(MODULE, "runs_on_blas", lambda x, weight, blas=blas: blas)
        monkeypatch.setattr(MODULE, "blas_linear", launch_linear)
        total, normed = linear_norm_cuda(x, weight, b, residual, norm_weight, 1e-6)
        assert torch.equal(total, want)
        assert torch.equal(normed, launch_rms_norm(want, norm_weight, 1e-6))


@pytest.mark.parametrize("blas", [False, True])
def test_a_norm_weight_in_fp32_rounds_once_on_both_ways(blas, dtype, device, monkeypatch):
    x, weight, b, residual, norm_weight = inputs(9, 48, 80, dtype, device)
    norm_weight = 1 + 0.3 * norm_weight.float()
    monkeypatch.setattr(MODULE, "runs_on_blas", lambda x, weight: blas)
    monkeypatch.setattr(MODULE, "blas_linear", launch_linear)
    total, normed = linear_norm_cuda(x, weight, b, residual, norm_weight, 1e-6)
    assert torch.equal(total, launch_linear(x, weight, b, residual))
    assert torch.equal(normed, launch_rms_norm(total.float(), norm_weight, 1e-6).to(dtype))


@pytest.mark.parametrize("wide", [False, True], ids=["", "norm weight in fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_op_is_the_two_ops(dtype, wide):
    x, weight, bias, residual, norm_weight = inputs(21, 40, 30, dtype, "cpu")
    norm_weight = norm_weight.float() if wide else norm_weight
    total, normed = linear_norm(x, weight, bias, residual, norm_weight, 1e-6)
    assert torch.equal(total, linear(x, weight, bias, residual))
    assert torch.equal(normed, rms_norm(total, norm_weight, 1e-6))
    fake = linear_norm(*(t.to("meta") for t in (x, weight, bias, residual, norm_weight)), 1e-6)
    assert [t.shape for t in fake] == [(21, 40), (21, 40)]
    assert torch.equal(
        linear_norm_cpu(x, weight, None, residual, norm_weight, 1e-6)[0], linear(x, weight, None, residual)
    )
