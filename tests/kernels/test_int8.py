"""int8 products: exact sums of integers with and without a zero point, and 8-bit weights; the same in any batch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine
from unisono.kernels import hopper
from unisono.kernels.gemm import fp8_gluon
from unisono.kernels.gemm.decoded import integer_steps
from unisono.kernels.gemm.fp8_quantize import INT8_ROWS, Quantised, quantised_cpu, quantize
from unisono.kernels.gemm.int8 import (
    exact_int8_rows,
    int8_linear,
    int8_linear_op,
    launch_int8_linear,
    launch_quantize_int8,
    quantize_int8_op,
)
from unisono.kernels.gemm.int8_weights import (
    int8_decode,
    int8_weight_linear,
    int8_weight_linear_cuda,
    launch_int8_decode,
    launch_int8_weight_linear,
)
from unisono.kernels.gemm.linear import launch_linear
from unisono.kernels.gemm.tile import Tile

SHAPES = [(1, 64, 256), (5, 70, 90), (20, 33, 200)]  # M, N, K
KINDS = ["dynamic", "shifted", "fixed"]


def operands(n: int, k: int, shifted: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    return weight, 1e-4 + 1e-3 * torch.rand(n), weight.sum(1, dtype=torch.int32) if shifted else None


def rows_of(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows around another middle than 0, one of zeros, and one value far outside of the others."""
    x = torch.randn(rows, k) + torch.randn(rows, 1)
    x[0, 0] = 900
    x[-1] = 0
    return x.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_rows_are_float64s(kind, shape, dtype, device):
    x = rows_of(shape[0], shape[2], dtype)
    fixed, shifted = torch.tensor([0.02]) if kind == "fixed" else None, kind == "shifted"
    x8, scales, shifts = quantize_int8_op.cpu(x, fixed, shifted)
    got = launch_quantize_int8(x.to(device), None if fixed is None else fixed.to(device), shifted)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, (x8, scales, shifts), strict=True))
    values = (x8.double() - shifts[:, None]) * scales.double()[:, None]
    reach = 0.02 * 128 if kind == "fixed" else float("inf")
    off = (values - x.double().clamp(-reach, reach)).abs() / scales.double()[:, None]
    assert off.max() < (1.01 if kind == "fixed" else 0.51 if kind == "dynamic" else 1.01)
    if kind != "fixed":
        assert values[-1].abs().max() == 0, "zero is no exact number"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_exact_and_rows_stand_alone(kind, shape, dtype, device):
    rows, n, k = shape
    weight, weight_scales, sums = operands(n, k, kind == "shifted")
    fixed = torch.tensor([0.02]) if kind == "fixed" else None
    x, bias, residual = rows_of(rows, k, dtype), torch.randn(n).to(dtype), torch.randn(rows, n).to(dtype)
    quantised = quantize_int8_op.cpu(x, fixed, kind == "shifted")
    want = int8_linear_op.cpu(*quantised, weight, weight_scales, sums, x, bias, residual)
    exact = (quantised[0].double() - quantised[2][:, None]) @ weight.double().t()
    exact = exact * quantised[1].double()[:, None] * weight_scales.double()
    product = int8_linear_op.cpu(*quantised, weight, weight_scales, sums, x, None, None)
    torch.testing.assert_close(product.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(want, (product + bias) + residual)
    on = [None if t is None else t.to(device) for t in (*quantised, weight, weight_scales, sums, x, bias, residual)]
    for tile in (None, Tile(32, 32, 64, 4, 2)):
        assert torch.equal(launch_int8_linear(*on, tile).cpu(), want), "another tile has other bits"
    last = [t[-1:] for t in on[:3]]
    alone = launch_int8_linear(*last, *on[3:6], on[6][-1:], on[7], on[8][-1:])
    assert torch.equal(alone.cpu(), want[-1:])


@pytest.mark.parametrize("case", [(3, 1, 130, 1200), (2, 19, 64, 300)])
def test_programs_of_few_rows_compute_the_product(case):
    """The Gluon kernel's programs as threads, on rows that the kernel ahead has quantised."""
    programs, rows, n, k = case
    weight, weight_scales, _ = operands(n, k, False)
    x8, scales = quantised_cpu(torch.randn(rows, k).half(), INT8_ROWS)
    bias, residual = torch.randn(n).half(), torch.randn(rows, n).half()
    tile, out = Tile(16, 32, 128, 4, 2, registers=64), torch.full((rows, n), float("nan")).half()
    Machine((fp8_gluon, hopper), programs).run(
        fp8_gluon.fp8_rows_kernel,
        x_desc=Descriptor(x8, [tile.m, fp8_gluon.STEP]), w_desc=Descriptor(weight, [tile.n, fp8_gluon.STEP]),
        x_scales=scales, w_scales=weight_scales, bias=bias, residual=residual, out=out, M=rows, N=n, K=k, PART=n,
        PADDED=len(x8), BY_BLOCK=False, HAS_BIAS=True, HAS_RESIDUAL=True, OVERLAP=True, **fp8_gluon._sizes(tile),
    )  # fmt: skip
    quantised = Quantised(x8, scales, INT8_ROWS, rows, torch.float16)
    assert torch.equal(out, int8_linear(quantised, weight, weight_scales, None, None, bias, residual))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("size", [(4096, 512), (200, 144), (12320, 1152)])
def test_the_kernel_of_few_rows_has_the_tritons_bits(size, device):
    weight, weight_scales, _ = (None if t is None else t.to(device) for t in operands(*size, False))
    assert exact_int8_rows.same_bits(weight, weight_scales, torch.bfloat16)


def test_rows_of_another_format_are_no_operand():
    quantised = quantize(torch.randn(2, 128), 0)
    weight, weight_scales, _ = operands(8, 128, False)
    with pytest.raises(ValueError, match="groups of 0"):
        int8_linear(quantised, weight, weight_scales)


def weights(n: int, k: int, group: int, zeros: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    groups = -(-k // group)
    numbers, scales = torch.randint(0, 256, (n, k), dtype=torch.uint8), 1e-4 + 1e-3 * torch.rand(n, groups)
    return numbers, scales, torch.randint(0, 257, (n, groups), dtype=torch.int16) if zeros else None


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 256, 128), (5, 70, 96, 32), (3, 40, 120, 120)])
def test_weights_of_8_bits(shape, zeros, dtype, device, assert_close):
    rows, n, k, group = shape
    stored = weights(n, k, group, zeros)
    numbers, scales, middles = stored
    of = torch.arange(k) // group
    shift = 128 if middles is None else middles.double()[:, of]
    want = (numbers.double() - shift) * scales.double()[:, of]
    x, bias, residual = (torch.randn(size).to(dtype) for size in ((rows, k), (n,), (rows, n)))
    on = [None if t is None else t.to(device) for t in stored]
    decoded = launch_int8_decode(*on, group, dtype)
    assert torch.equal(decoded.cpu(), int8_decode(*stored, group, dtype))
    torch.testing.assert_close(decoded.cpu().double(), want, rtol=torch.finfo(dtype).eps, atol=1e-7)
    product = x.double() @ want.t()
    assert_close(int8_weight_linear.cpu(x, *stored, group, None, None), product)
    assert_close(
        int8_weight_linear_cuda(x.to(device), *on, group, bias.to(device), residual.to(device)),
        product + bias + residual,
    )
    packed = launch_int8_weight_linear(x.to(device), *on, group, None, None)
    tile = None if device.type == "cuda" else Tile(16, 32, integer_steps(group)[0], 4, 2)
    assert torch.equal(packed, launch_linear(x.to(device), decoded, None, None, tile))
