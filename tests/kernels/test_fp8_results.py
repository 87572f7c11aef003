"""Kernels that quantise what they make: the bits of the kernel and of the quantisation after it, in one launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unisono.kernels import rms_norm, sigmoid_gate, silu_mul
from unisono.kernels.gemm.fp8 import fp8_linear, fp8_product
from unisono.kernels.gemm.fp8_quantize import INT8_ROWS, Quantised, launch_quantize, padded_rows, quantize
from unisono.kernels.gemm.int8 import launch_quantize_int8
from unisono.kernels.moe.combine import (
    combine_experts_norm,
    combine_experts_norm_fp8,
    combine_experts_op,
    launch_combine,
)
from unisono.kernels.norm.activation import (
    launch_sigmoid_gate,
    launch_sigmoid_gate_fp8,
    launch_silu_mul,
    launch_silu_mul_fp8,
    sigmoid_gate_fp8,
    silu_mul_fp8,
)
from unisono.kernels.norm.gated_norm import (
    gated_norm,
    gated_norm_fp8,
    launch_gated_norm,
    launch_gated_norm_fp8,
    quantises,
)
from unisono.kernels.norm.rms_norm import (
    launch_add_rms_norm,
    launch_add_rms_norm_fp8,
    launch_rms_norm,
    launch_rms_norm_fp8,
    rms_norm_fp8,
)

GROUPS = [128, 0, INT8_ROWS]
Pair = tuple[torch.Tensor, torch.Tensor]


def rows_of(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random rows of different magnitudes; the second is zero."""
    x = torch.randn(shape) * torch.exp(torch.randn(shape[0], *(1,) * (len(shape) - 1)))
    x[1:2] = 0
    return x.to(device, dtype)


def assert_quantised(got: Pair, plain: torch.Tensor, group: int) -> None:
    """got: what :func:`launch_quantize` makes of ``plain``, padding rows included; for int8 also the product's rule."""
    if group == INT8_ROWS:
        padded = torch.nn.functional.pad(plain, (0, 0, 0, padded_rows(len(plain)) - len(plain)))
        x8, scales, _ = launch_quantize_int8(padded, None, False)
        assert torch.equal(got[0], x8)
        assert torch.equal(got[1][0], scales)
    want = launch_quantize(plain, group or None)
    assert got[0].shape == want[0].shape
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)), "-0 is not 0"
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 200), (4, 1024), (3, 2300), (65, 1200)])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(rows, size, group, centred, dtype, device):
    x, residual = (rows_of(rows, size, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(size).to(device, torch.float32 if centred else dtype)
    want = launch_rms_norm(x, weight, 1e-6)
    for keep in (True, False):
        normed, *got = launch_rms_norm_fp8(x, weight, 1e-6, group, keep)
        assert_quantised(got, want, group)
        assert torch.equal(normed, want) if keep else normed.numel() == 0
    total, added = launch_add_rms_norm(x, residual, weight, 1e-6)
    ours, normed, *got = launch_add_rms_norm_fp8(x, residual, weight, 1e-6, group, True)
    assert torch.equal(ours, total)
    assert torch.equal(normed, added)
    assert_quantised(got, added, group)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("rows", "size"), [(1, 40), (5, 1500), (4, 1024)])
def test_silu(rows, size, group, dtype, device):
    x = rows_of(rows, 2 * size, dtype=dtype, device=device)
    assert_quantised(launch_silu_mul_fp8(x, group), launch_silu_mul(x), group)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("heads", "dim"), [(3, 24), (5, 256)])
def test_sigmoid_gates(heads, dim, group, dtype, device):
    x, both = (rows_of(5, n, dtype=dtype, device=device) for n in (heads * dim, 2 * heads * dim + 20))
    given = x, both[:, :-7], heads
    assert_quantised(launch_sigmoid_gate_fp8(*given, group), launch_sigmoid_gate(*given), group)


@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (4, 32), (12, 64), (32, 16)])
def test_gated_norms(heads, dim, dtype, device):
    o, z = (rows_of(5, n, dtype=dtype, device=device) for n in (heads * dim, heads * dim + 9))
    given = o, z[:, 3:-6], torch.randn(dim).to(device), 1e-6
    assert quantises(dim, 128)
    assert_quantised(launch_gated_norm_fp8(*given, 128), launch_gated_norm(*given), 128)


def test_sizes_that_gated_norm_can_quantise():
    """It has eight heads of a row."""
    assert not quantises(128, 0)
    assert not quantises(8, 128)
    assert quantises(16, 128)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("rows", "size", "top_k"), [(1, 64, 2), (5, 300, 3)])
def test_combined_expert_outputs_are_quantised(rows, size, top_k, shared, group, dtype, device):
    y, own, residual = (rows_of(n, size, dtype=dtype, device=device) for n in (rows * top_k, rows, rows))
    y[-1] = torch.nan  # a pair without an expert
    weights = torch.rand(rows, top_k).to(device)
    weights[-1, -1] = 0
    given = y, weights, *((own, torch.rand(rows).to(device)) if shared else (None, None)), residual
    weight = torch.randn(size).to(device)
    total, normed, *_ = launch_combine(*given, weight, 1e-6)
    assert total.isfinite().all()
    for keep in (True, False):
        ours, got, *quantised = launch_combine(*given, weight, 1e-6, group, keep)
        assert torch.equal(ours, total)
        assert torch.equal(got, normed) if keep else got.numel() == 0
        assert_quantised(quantised, normed, group)


def ops(dtype: torch.dtype) -> list[tuple[Callable[[], torch.Tensor], Callable[[str, int], Quantised]]]:
    """Of each op: without quantisation, and with it (on a device, with a group), on five rows of 256."""
    x, up, weight = torch.randn(5, 256).to(dtype), torch.randn(5, 512).to(dtype), torch.randn(256).to(dtype)
    of_head, pairs, weights = torch.rand(32), torch.randn(10, 256).to(dtype), torch.rand(5, 2)
    mixed = pairs, weights, None, None, x, weight, 1e-6

    def to(device: str, *given):
        return (t.to(device) if isinstance(t, torch.Tensor) else t for t in given)

    return [
        (lambda: rms_norm(x, weight, 1e-6), lambda d, g: rms_norm_fp8(*to(d, x, weight), 1e-6, g, True)),
        (lambda: silu_mul(up), lambda d, g: silu_mul_fp8(*to(d, up), g)),
        (lambda: sigmoid_gate(x, up, 2), lambda d, g: sigmoid_gate_fp8(*to(d, x, up), 2, g)),
        (lambda: gated_norm(x, up[:, 256:], of_head, 1e-6),
         lambda d, g: gated_norm_fp8(*to(d, x, up[:, 256:], of_head), 1e-6, g)),
        (lambda: combine_experts_norm(*mixed)[1], lambda d, g: combine_experts_norm_fp8(*to(d, *mixed), g, False)[1]),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("group", GROUPS)
def test_ops_dispatch_and_know_their_shapes(number, group, dtype):
    plain, quantised = ops(dtype)[number]
    want, got, meta = plain(), quantised("cpu", group), quantised("meta", group)
    again = quantize(want, group)
    assert torch.equal(got.x8.float(), again.x8.float())
    assert torch.equal(got.scales, again.scales)
    assert (got.rows, got.dtype, got.group) == (5, dtype, group)
    assert got.x is None or torch.equal(got.x, want)
    assert (meta.x8.shape, meta.scales.shape) == (got.x8.shape, got.scales.shape)
    assert got.x8.shape[0] == padded_rows(5)


@pytest.mark.parametrize("by_block", [True, False])
def test_a_product_of_quantised_rows_is_the_linear_layers(by_block, dtype):
    weight, x = (torch.randn(130, 200) * 50).to(torch.float8_e4m3fn), torch.randn(5, 200).to(dtype)
    scales = (torch.rand(2, 2) if by_block else torch.rand(130)) * 1e-2
    bias, residual = torch.randn(130).to(dtype), torch.randn(5, 130).to(dtype)
    q = quantize(x, 128 if by_block else 0)
    assert torch.equal(fp8_product(q, weight, scales), fp8_linear(x, weight, scales))
    both = fp8_product(q, weight, scales, bias, residual)
    assert torch.equal(both, fp8_linear.cpu(x, weight, scales, None, bias, residual))
    meta = Quantised(q.x8.to("meta"), q.scales.to("meta"), q.group, 5, dtype)
    shape = fp8_product(meta, weight.to("meta"), scales.to("meta"))
    assert shape.shape == (5, 130)
    assert shape.dtype is dtype


def test_the_twins_of_combine_agree_with_their_kernel(device):
    """In fp32, where the interpreter's arithmetic is the twin's."""
    y, residual = torch.randn(6, 128), torch.randn(3, 128)
    given = y, torch.rand(3, 2), None, None, residual, torch.randn(128), 1e-6, 128, True
    ours = launch_combine(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in given))
    for a, b in zip(combine_experts_op.cpu(*given), ours, strict=True):
        assert a.shape == b.shape
        assert (a.float() - b.float().cpu()).norm() <= 2e-2 * a.float().norm()
