"""fp8 products: right against the dequantised operands in float64, alike in kernel and twin, the same in any batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine
from unisono.kernels import hopper
from unisono.kernels.gemm import fp8, fp8_gluon, fp8_quantize
from unisono.kernels.gemm.fp8 import (
    fp8_linear,
    fp8_linear_cuda,
    launch_fp8_product,
)
from unisono.kernels.gemm.fp8_quantize import E4M3, launch_quantize, quantised_cpu, quantize_cpu
from unisono.kernels.gemm.tile import Tile

SHAPES = [(1, 64, 128), (5, 130, 200), (20, 40, 640)]  # M, N, K
KINDS = ["by block", "by output", "fixed"]
RUNS = [fp8_linear_cuda, fp8_linear.cpu]


def weight_of(n: int, k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """e4m3 weight, its scales, and the activations' scales of two merged projections."""
    weight = (torch.randn(n, k) * 100).clamp(-448, 448).to(E4M3)
    scales = torch.rand(-(-n // 128), -(-k // 128)) if kind == "by block" else torch.rand(n)
    return weight, scales * 1e-3, torch.tensor([0.007, 0.011]) if kind == "fixed" else None


def quantised(x: torch.Tensor, kind: str, fixed: torch.Tensor | None) -> torch.Tensor:
    """Values [M, K] in float64 that quantised activations stand for, one group after the other."""
    out = torch.empty_like(x, dtype=torch.float64)
    width = 128 if kind == "by block" else x.shape[1]
    for start in range(0, x.shape[1], width):
        part = x[:, start : start + width].float()
        scale = part.abs().amax(1, keepdim=True) / 448 if fixed is None else fixed.max().expand(len(x), 1)
        out[:, start : start + width] = (part / scale).clamp(-448, 448).to(E4M3).double() * scale.double()
    return out


def test_quotients_and_scales_are_ieees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own division, with fused multiply-adds, for all mantissas of bf16 and many of other types.

    A CPU has no fused one: products of 24 bits are exact in float64.
    """
    fused = lambda a, b, c: (torch.as_tensor(a).double() * torch.as_tensor(b).double() + c).float()  # noqa: E731
    names = {"fma": fused, "where": torch.where, "maximum": lambda a, b: a.clamp(min=b)}
    monkeypatch.setattr(fp8_quantize, "tl", SimpleNamespace(**names))
    monkeypatch.setattr(fp8_quantize, "COMPILED", True)
    monkeypatch.setattr(fp8_quantize, "over", fp8_quantize.over.fn)
    mantissas, below = 1 + torch.arange(128) / 128, torch.exp2(-torch.arange(26.0))
    every = (below[:, None] * mantissas).flatten()
    for largest in (mantissas[:, None], 3e-9 * mantissas[:, None], torch.rand(500, 1) * 1e30, torch.zeros(1, 1)):
        value = torch.cat((every, -every, torch.tensor([0.0, -0.0]))) * largest.clamp(min=1e-10)
        value = torch.where(value.abs() <= largest, value, largest).float()
        scale = fp8_quantize.scale_for.fn(largest)
        assert torch.equal(scale, largest.clamp(min=1e-10) / 448)
        got = fp8_quantize.over(value, scale, fp8_quantize.reciprocal.fn(scale))
        assert torch.equal(got.view(torch.int32), (value / scale).view(torch.int32))


def dequantised(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] in float64, one value after the other's block."""
    n, k = weight.shape
    if scales.dim() == 1:
        return weight.double() * scales.double()[:, None]
    rows, cols = torch.arange(n) // 128, torch.arange(k) // 128
    return weight.double() * scales.double()[rows][:, cols]


def on(device: torch.device, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.to(device) for t in tensors]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(run, shape, kind, dtype, device, assert_close):
    rows, n, k = shape
    weight, scales, fixed = weight_of(n, k, kind)
    x, bias, residual = (torch.randn(size).to(dtype) for size in ((rows, k), (n,), (rows, n)))
    x[0] *= 30
    product = quantised(x, kind, fixed) @ dequantised(weight, scales).t()
    device = torch.device("cpu") if run is fp8_linear.cpu else device
    given = on(device, x, weight, scales, fixed)
    assert_close(run(*given, None, None), product, e4m3=True)
    assert_close(run(*given, *on(device, bias, residual)), product + bias + residual, e4m3=True)
    if dtype is torch.float32 and device.type == "cuda":
        return  # the GPU adds the bias to the scaled sum in one operation
    bare, b, r = run(*given, None, None), bias.to(device), residual.to(device)
    assert torch.equal(run(*given, b, r), (bare + b) + r), "bias and residual are rounded one after the other"


@pytest.mark.parametrize("group", [128, None])
@pytest.mark.parametrize("k", [128, 200, 1500])
def test_activations_are_quantised_alike(group, k, dtype, device):
    x = torch.randn(7, k).to(dtype)
    x[2], x[3, :5] = 0, 600  # a row of zeros; one whose other values are small
    for fixed in (None, torch.tensor([0.01, 0.4]), (0.4 - torch.arange(258) / 1000).roll(200).abs().view(129, 2)):
        want, want_scales = quantize_cpu(x, group, fixed)
        got, scales = launch_quantize(x.to(device), group, None if fixed is None else fixed.to(device))
        assert torch.equal(got[:7].cpu().float(), want.float())
        assert torch.equal(scales[:, :7].cpu(), want_scales)
        assert got.shape == (8, k)
        assert not got[7].float().any(), "padding is zero"
    assert want.float().abs().max() == 448, "what lies beyond the largest value is clamped to it"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS)
def test_rows_are_exact(run, kind, dtype, device, assert_rows_exact):
    device = torch.device("cpu") if run is fp8_linear.cpu else device
    n, k, rows = (130, 300, 24) if run is fp8_linear.cpu or device.type == "cuda" else (40, 150, 5)
    weight, scales, fixed = on(device, *weight_of(n, k, kind))
    x, residual = torch.randn(rows, k).to(device, dtype), torch.randn(rows, n).to(device, dtype)
    assert_rows_exact(lambda x, residual: run(x, weight, scales, fixed, None, residual), x, residual)


@pytest.mark.parametrize("kind", ["by block", "by output"])
@pytest.mark.parametrize("k", [512, 700])
def test_the_tile_changes_no_bit(kind, k, device):
    """The interpreter adds a step's products in order, and steps in order; so must every blocking."""
    weight, scales, _ = on(device, *weight_of(130, k, kind))
    x = torch.randn(18, k, device=device).to(torch.float16)
    x8, x_scales = launch_quantize(x, 128 if kind == "by block" else None)
    sizes = ((16, 64, 4, 3), (32, 64, 4, 3), (16, 128, 4, 2))
    tiles = [*(Tile(m, n, 128, *rest, ahead=True) for m, n, *rest in sizes), Tile(128, 128, 128, 8, 4)]
    outs = [launch_fp8_product(x8, x_scales, weight, scales, None, None, 18, x.dtype, tile) for tile in tiles]
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("rows", [3, 65])
@pytest.mark.parametrize("part", [64, 192])
def test_projections_whose_blocks_begin_anew_are_one_product(rows, part, dtype, device):
    """Gate and up of a size that is no multiple of 128: the bits of a product each."""
    k = 200
    each = [on(device, *weight_of(part, k, "by block")[:2]) for _ in range(2)]
    weight, scales = (torch.cat(both) for both in zip(*each, strict=True))
    x = torch.randn(rows, k).to(device, dtype)
    bias, residual = torch.randn(2 * part).to(device, dtype), torch.randn(rows, 2 * part).to(device, dtype)
    x8, x_scales = launch_quantize(x, 128)
    want = torch.cat([launch_fp8_product(x8, x_scales, *own, None, None, rows, dtype) for own in each], 1)
    options = rows, dtype, weight, scales
    assert torch.equal(fp8.fp8_product_cuda(x8, x_scales, *options, None, None, part), want)
    summed = fp8.fp8_product_cuda(x8, x_scales, *options, bias, residual, part)
    if device.type == "cuda" or dtype is not torch.float32:
        assert torch.equal(summed, (want + bias) + residual)
    on_cpu = quantize_cpu(x.cpu(), 128)
    twins = [fp8.fp8_product_op.cpu(*on_cpu, rows, dtype, w.cpu(), s.cpu(), None, None) for w, s in each]
    found = fp8.fp8_product_op.cpu(*on_cpu, rows, dtype, weight.cpu(), scales.cpu(), None, None, part)
    assert torch.equal(found, torch.cat(twins, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's scaled_mm of blocks needs a GPU")
@pytest.mark.parametrize("kind", ["by block", "by output"])
def test_both_products_give_one_rows_bits(kind, device):
    weight, scales, _ = on(device, *weight_of(512, 1024, kind))
    fp8.prove_fp8(weight, scales, torch.bfloat16)
    x = torch.randn(600, 1024, device=device, dtype=torch.bfloat16)
    want = fp8_linear(x, weight, scales)
    for rows in (1, 3, 16, 17, 64, 65, 100, 257):
        assert torch.equal(fp8_linear(x[:rows], weight, scales), want[:rows])


def test_op_dispatches_and_knows_its_shape():
    weight, scales, _ = weight_of(40, 200, "by block")
    x = torch.randn(3, 200)
    assert torch.equal(fp8_linear(x, weight, scales), fp8_linear.cpu(x, weight, scales, None, None, None))
    assert fp8_linear(x[:0], weight, scales).shape == (0, 40)
    assert fp8_linear(*(t.to("meta") for t in (x, weight, scales))).shape == (3, 40)
    assert fp8.prove_fp8(weight, scales, torch.float32), "nothing to compare on a CPU"


def test_unsupported_scaled_mm_fails_the_proof(monkeypatch):
    """The proof fails instead of raising, and what failed stays failed."""
    monkeypatch.setattr(fp8, "launch_quantize", lambda x, group: (x, x))
    monkeypatch.setattr(fp8, "launch_fp8_product", lambda *given: torch.zeros(1))

    def refuse(*given):
        raise RuntimeError("multiplication of these is not supported")

    monkeypatch.setattr(fp8, "_scaled_mm", refuse)
    weight, scales, _ = weight_of(40, 200, "by block")
    assert not fp8.exact_scaled_mm.same_bits(weight, scales, torch.bfloat16)


@pytest.mark.parametrize("kind", ["by block", "by output"])
@pytest.mark.parametrize("case", [(3, 1, 130, 1200), (2, 19, 64, 300), (5, 8, 48, 512)])
def test_programs_of_few_rows_compute_the_product(case: tuple[int, ...], kind: str) -> None:
    """The Gluon kernel's programs as threads: stages are free before they are loaded, each tile is stored once."""
    programs, rows, n, k = case
    weight, scales, _ = weight_of(n, k, kind)
    x8, x_scales = quantised_cpu(torch.randn(rows, k).half(), 128 if kind == "by block" else 0)
    residual = torch.randn(rows, n).half()
    tile = Tile(16, 32, 128, 4, 2, registers=64)
    out = torch.full((rows, n), float("nan")).half()
    Machine((fp8_gluon, hopper), programs).run(
        fp8_gluon.fp8_rows_kernel,
        x_desc=Descriptor(x8, [tile.m, fp8_gluon.STEP]), w_desc=Descriptor(weight, [tile.n, fp8_gluon.STEP]),
        x_scales=x_scales, w_scales=scales, bias=out, residual=residual, out=out, M=rows, N=n, K=k, PADDED=len(x8),
        PART=n, BY_BLOCK=kind == "by block", HAS_BIAS=False, HAS_RESIDUAL=True, OVERLAP=True, **fp8_gluon._sizes(tile),
    )  # fmt: skip
    expected = fp8.fp8_product_op.cpu(x8, x_scales, rows, torch.float16, weight, scales, None, residual)
    torch.testing.assert_close(out, expected, rtol=0.01, atol=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("kind", ["by block", "by output"])
@pytest.mark.parametrize("size", [(4096, 512), (200, 144), (12320, 1152)])
def test_the_kernel_of_few_rows_has_the_tritons_bits(size, kind, device):
    """In tiles of every kind, for shapes that fill none of them."""
    weight, scales, _ = on(device, *weight_of(*size, kind))
    bias, residual = (torch.randn(shape, device=device).bfloat16() for shape in (size[0], (64, size[0])))
    for rows in (1, 3, 16, 17, 33, 64):
        x8, x_scales = fp8.launch_quantize(torch.randn(rows, size[1], device=device).bfloat16(), fp8._group(scales))
        for tile in (None, *(Tile(r, o, 128, 4, 2, registers=112) for r in (16, 32) for o in (16, 32, 64))):
            for given in ((None, None), (bias, residual[:rows])):
                operands = x8, x_scales, weight, scales, *given, rows, torch.bfloat16
                assert torch.equal(fp8_gluon.launch_fp8_rows(*operands, tile), fp8.launch_fp8_product(*operands))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wgmma needs a Hopper GPU")
def test_the_kernel_of_few_rows_multiplies_parts(device):
    each = [on(device, *weight_of(2112, 512, "by block")[:2]) for _ in range(2)]
    weight, scales = (torch.cat(both) for both in zip(*each, strict=True))
    for rows in (1, 17, 64):
        x8, x_scales = fp8.launch_quantize(torch.randn(rows, 512, device=device).bfloat16(), 128)
        options = None, None, rows, torch.bfloat16
        want = torch.cat([fp8.launch_fp8_product(x8, x_scales, *own, *options) for own in each], 1)
        assert torch.equal(fp8.launch_fp8_product(x8, x_scales, weight, scales, *options, part=2112), want)
        assert torch.equal(fp8_gluon.launch_fp8_rows(x8, x_scales, weight, scales, *options, part=2112), want)
