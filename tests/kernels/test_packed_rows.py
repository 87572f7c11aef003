"""The Hopper kernel of few rows with 4-bit weights, its programs as threads and on a GPU."""

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine, Number
from unisono.kernels import hopper
from unisono.kernels.gemm import fp8_gluon, packed_decoding, packed_gluon
from unisono.kernels.gemm.int4 import exact_int4_rows, unpack_cpu
from unisono.kernels.gemm.linear import launch_linear
from unisono.kernels.gemm.nvfp4 import exact_nvfp4_rows, nvfp4_decode
from unisono.kernels.gemm.packed_decoding import NVFP4_GROUP
from unisono.kernels.gemm.packed_gluon import launch_packed_rows
from unisono.kernels.gemm.tile import Tile

KINDS = ("int4", "int4 zeros", "nvfp4")


def weight_of(kind: str, n: int, k: int) -> tuple:
    """(weight, scales, zeros or multipliers, group): operands of ``launch_packed_rows``."""
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    if kind == "nvfp4":
        return packed, torch.randint(0, 120, (n, k // 16), dtype=torch.uint8), torch.rand(n) * 1e-2, NVFP4_GROUP
    groups = -(-k // 128)
    zeros = torch.randint(0, 16, (n, groups)).to(torch.int8) if kind == "int4 zeros" else None
    return packed, (0.5 + torch.rand(n, groups)) * 0.01, zeros, 128


def decoded(operands: tuple, dtype: torch.dtype) -> torch.Tensor:
    return nvfp4_decode(*operands[:3], dtype) if operands[3] == NVFP4_GROUP else unpack_cpu(*operands, dtype)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float16) for kind in KINDS), ("nvfp4", torch.bfloat16)])
@pytest.mark.parametrize(("outputs", "turns"), [(64, 1), (64, 2), (32, 1), (32, 2)])
def test_programs_compute_the_product(kind, dtype, outputs, turns):
    """Stages are free before they are loaded, and groups of warps add up the pieces in turn."""
    rows, n, k = 19, 100, 1216  # the last tiles of both and the last piece are not full
    operands, x = weight_of(kind, n, k), torch.randn(rows, k).to(dtype)
    weight, scales, zeros, group = operands
    residual = torch.randn(rows, n).to(dtype)
    tile = Tile(16, outputs, 128, 4 * turns, 4, registers=80)
    out = torch.full((rows, n), float("nan")).to(dtype)
    Machine((packed_gluon, packed_decoding, fp8_gluon, hopper), (2, -(-n // outputs))).run(
        packed_gluon.packed_rows_kernel,
        x_desc=Descriptor(x, [tile.m, 64]), w_desc=Descriptor(weight, [outputs, 64]),
        scales=(scales.view(torch.int32) if kind == "nvfp4" else scales).view(-1),
        zeros=torch.zeros(1) if zeros is None else zeros, bias=out, residual=residual, out=out,
        M=rows, N=n, K=Number(k), GROUP=group, NVFP4=kind == "nvfp4", HAS_ZEROS=kind == "int4 zeros",
        HAS_BIAS=False, HAS_RESIDUAL=True, OVERLAP=True, **packed_gluon._sizes(tile),
    )  # fmt: skip
    want = (x.float() @ decoded(operands, dtype).float().t()).to(dtype) + residual
    error = 2e-3 if dtype is torch.float16 else 2e-2
    torch.testing.assert_close(out, want, rtol=error, atol=error)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(4096, 512), (200, 1216)])
def test_the_kernel_of_few_rows_has_the_plain_bits(size, kind, device):
    operands = tuple(t.to(device) if isinstance(t, torch.Tensor) else t for t in weight_of(kind, *size))
    bias, residual = (torch.randn(shape, device=device).bfloat16() for shape in (size[0], (64, size[0])))
    for rows in (1, 3, 16, 17, 33, 64):
        x = torch.randn(rows, size[1], device=device).bfloat16()
        want = launch_linear(x, decoded(operands, torch.bfloat16), bias, residual[:rows])
        for outputs, turns in ((64, 1), (64, 2), (32, 1), (32, 2)):
            tile = Tile(16 if rows <= 16 else 64, outputs, 128, 4 * turns, 4, registers=104)
            assert torch.equal(launch_packed_rows(x, *operands, bias, residual[:rows], tile), want)


@pytest.mark.parametrize("kernel", [exact_int4_rows, exact_nvfp4_rows])
def test_a_device_without_the_kernel_keeps_the_triton_one(kernel):
    *operands, group = weight_of("nvfp4" if kernel is exact_nvfp4_rows else "int4", 64, 256)
    operands += [] if kernel is exact_nvfp4_rows else [group]
    assert not kernel.same_bits(*operands, torch.bfloat16)
    assert kernel.prove(*operands, torch.bfloat16), "nothing to compare on a CPU"
