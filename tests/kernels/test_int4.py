"""4-bit products: right against the dequantised weight in float64, the plain product's bits, the same in any batch."""

from __future__ import annotations

import importlib

import pytest
import torch

from unisono.kernels.gemm import decoded, int4
from unisono.kernels.gemm.int4 import (
    int4_linear,
    int4_linear_cuda,
    launch_int4_linear,
    launch_unpack,
    unpack_cpu,
)
from unisono.kernels.gemm.linear import launch_linear
from unisono.kernels.gemm.tile import Tile

linear = importlib.import_module("unisono.kernels.gemm.linear")  # the package's attribute of that name is the function

SHAPES = [(1, 64, 256, 128), (5, 70, 96, 32), (20, 33, 192, 64), (3, 40, 120, 120)]  # M, N, K, group
RUNS = [int4_linear_cuda, int4_linear.cpu]


def weight_of(n: int, k: int, group: int, zeros: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    groups = -(-k // group)
    packed, scales = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), 0.001 + 0.01 * torch.rand(n, groups)
    return packed, scales, torch.randint(0, 17, (n, groups), dtype=torch.int8) if zeros else None


def dequantised(packed, scales, zeros, group: int) -> torch.Tensor:
    """The weight in float64, input by input."""
    n, k = packed.shape[0], 2 * packed.shape[1]
    out = torch.empty(n, k, dtype=torch.float64)
    for i in range(k):
        q = packed[:, i // 2].int() // 16 if i % 2 else packed[:, i // 2].int() % 16
        zero = 8 if zeros is None else zeros[:, i // group].int()
        out[:, i] = (q - zero).double() * scales[:, i // group].double()
    return out


def on(device: torch.device, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.to(device) for t in tensors]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(run, shape, zeros, dtype, device, assert_close):
    rows, n, k, group = shape
    stored = weight_of(n, k, group, zeros)
    weight = dequantised(*stored, group)
    x, bias, residual = (torch.randn(size).to(dtype) for size in ((rows, k), (n,), (rows, n)))
    device = torch.device("cpu") if run is int4_linear.cpu else device
    given = (*on(device, x, *stored), group)
    product = x.double() @ weight.t()
    assert_close(run(*given, None, None), product)
    assert_close(run(*given, *on(device, bias, residual)), product + bias + residual)
    bare, b, r = run(*given, None, None), bias.to(device), residual.to(device)
    assert torch.equal(run(*given, b, r), (bare + b) + r), "bias and residual are rounded one after the other"


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_is_one_rounding_and_both_products_agree(shape, zeros, dtype, device):
    rows, n, k, group = shape
    stored = weight_of(n, k, group, zeros)
    want = dequantised(*stored, group)
    unpacked = launch_unpack(*on(device, *stored), group, dtype)
    assert torch.equal(unpacked.cpu(), unpack_cpu(*stored, group, dtype))
    torch.testing.assert_close(unpacked.cpu().double(), want, rtol=torch.finfo(dtype).eps, atol=1e-7)
    x = torch.randn(rows, k, device=device).to(dtype)
    packed = launch_int4_linear(x, *on(device, *stored), group, None, None)
    # The interpreter adds up each tile of K before it adds tiles, a GPU does not: there it has the same tiles of K.
    tile = None if device.type == "cuda" else Tile(16, 32, decoded.integer_steps(group)[0], 4, 2)
    assert torch.equal(packed, launch_linear(x, unpacked, None, None, tile)), "the plain product has other bits"


@pytest.mark.parametrize("run", RUNS)
def test_rows_are_exact(run, dtype, device, assert_rows_exact):
    device = torch.device("cpu") if run is int4_linear.cpu else device
    rows, n, k = (24, 70, 256) if run is int4_linear.cpu or device.type == "cuda" else (6, 40, 96)
    stored = on(device, *weight_of(n, k, 32, True))
    x, residual = torch.randn(rows, k).to(device, dtype), torch.randn(rows, n).to(device, dtype)
    assert_rows_exact(lambda x, residual: run(x, *stored, 32, None, residual), x, residual)


def test_the_tile_changes_no_bit(device):
    stored = on(device, *weight_of(70, 384, 128, True))
    x = torch.randn(20, 384, device=device).to(torch.float16)
    tiles = [Tile(16, 64, 0, 4, 4), Tile(32, 64, 0, 4, 3), Tile(128, 64, 0, 4, 3)]
    outs = [launch_int4_linear(x, *stored, 128, None, None, tile) for tile in tiles]
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has one product")
def test_both_products_give_one_rows_bits(device):
    stored = on(device, *weight_of(512, 1024, 128, True))
    int4.prove_int4(*stored, 128, torch.bfloat16)
    x = torch.randn(600, 1024, device=device, dtype=torch.bfloat16)
    want = int4_linear(x, *stored, 128)
    for rows in (1, 3, 16, 17, 64, 65, 257):
        assert torch.equal(int4_linear(x[:rows], *stored, 128), want[:rows])


def test_op_dispatches_and_knows_its_shape():
    stored = weight_of(40, 128, 64, True)
    x = torch.randn(3, 128)
    assert torch.equal(int4_linear(x, *stored, 64), int4_linear.cpu(x, *stored, 64, None, None))
    assert int4_linear(x[:0], *stored, 64).shape == (0, 40)
    assert int4_linear(x.to("meta"), *(t.to("meta") for t in stored), 64).shape == (3, 40)
    assert int4.prove_int4(*stored, 64, torch.float32), "nothing to compare on a CPU"
