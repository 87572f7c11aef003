"""Products of few rows with wgmma: the kernel's programs as threads, and on a GPU the Triton kernel's bits."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.kernels.gluon_threads import Descriptor, Machine
from unisono.kernels import hopper
from unisono.kernels.gemm import persistent, rows_gluon
from unisono.kernels.gemm.persistent import box_of
from unisono.kernels.gemm.rows_gluon import RowsTile, launch_rows

linear = importlib.import_module("unisono.kernels.gemm.linear")


@pytest.mark.parametrize(
    ("programs", "rows", "n", "k", "outputs", "stages"),
    [
        (9, 1, 72, 1288, 8, 2),  # one tile a program, the last step is not whole
        (2, 5, 40, 512, 8, 3),  # several tiles; two stages of three are loaded early
        (3, 16, 90, 768, 16, 2),  # outputs beyond the last
        (2, 21, 144, 520, 48, 2),  # boxes of 16 of 64 rows
        (1, 3, 64, 256, 64, 2),  # no row beyond a step's
    ],
)
def test_programs_compute_the_product(programs: int, rows: int, n: int, k: int, outputs: int, stages: int) -> None:
    """Stages are free before they are loaded, and what lies beyond a step's outputs is not stored."""
    tile = RowsTile(max(8, 1 << (rows - 1).bit_length()), outputs, stages)
    x, weight, residual = torch.randn(rows, k).half(), torch.randn(n, k).half(), torch.randn(rows, n).half()
    bias, out = torch.randn(n).half(), torch.full((rows, n), torch.nan).half()
    Machine((rows_gluon, persistent, hopper), programs).run(
        rows_gluon.rows_kernel,
        x_desc=Descriptor(x, [tile.rows, rows_gluon.STEP]),
        w_desc=Descriptor(weight, [box_of(outputs), rows_gluon.STEP]),
        bias=bias, residual=residual, out=out, M=rows, N=n, K=k, HAS_BIAS=True, HAS_RESIDUAL=True, OVERLAP=True,
        **rows_gluon._sizes(tile),
    )  # fmt: skip
    product = (x.double() @ weight.double().t()).half()
    torch.testing.assert_close(out, (product + bias) + residual, rtol=0.01, atol=0.05)


@pytest.mark.parametrize(("n", "outputs"), [(1024, 8), (1056, 8), (1536, 16), (2048, 16), (6144, 48), (12288, 32)])
def test_tiles_of_parts(n: int, outputs: int) -> None:
    """Every multiprocessor has one tile where that is possible, and a tile's steps fit into shared memory."""
    tile = RowsTile.of(1, n, 12288, 132)
    assert (tile.rows, tile.outputs) == (8, outputs)
    for rows in (1, 16, 64):
        tile = RowsTile.of(rows, n, 12288, 132)
        held = (tile.stages * rows_gluon.EACH + 64 // tile.held - 1) * tile.held
        assert 128 * (held + tile.stages * rows_gluon.EACH * tile.rows) <= 200 * 1024
        assert tile.stages > 1


def test_a_part_is_served_where_its_bits_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(32, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    asked: list[str] = []
    monkeypatch.setattr(linear, "launch_linear", lambda *_: asked.append("triton"))
    monkeypatch.setattr(rows_gluon, "launch_rows", lambda *_: asked.append("wgmma"))
    assert linear.exact_rows.prove(weight), "nothing to compare on a CPU"
    linear.linear_cuda(x, weight, None, None)
    monkeypatch.setattr(rows_gluon, "processors", lambda device: 132)
    linear.linear_cuda(x, weight, None, None)
    monkeypatch.setitem(linear.exact_rows.serving, rows_gluon.key_of(weight), True)
    linear.linear_cuda(x, weight, None, None)
    linear.linear_cuda(torch.randn(65, 64).bfloat16(), weight, None, None)
    assert asked == ["triton", "triton", "wgmma", "triton"]
    assert not rows_gluon.suits(1, torch.empty(rows_gluon.MOST_OUTPUTS + 8, 64, dtype=torch.bfloat16))
    assert not rows_gluon.suits(1, torch.empty(32, 60, dtype=torch.bfloat16))
    assert not rows_gluon.suits(1, torch.empty(32, 64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wgmma needs a Hopper GPU")
@pytest.mark.parametrize(("n", "k"), [(1024, 12288), (1536, 4096), (6144, 4096), (200, 1288), (2112, 520)])
def test_the_kernel_has_the_tritons_bits(n: int, k: int, device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        weight, bias = torch.randn(n, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
        for rows in (1, 3, 8, 9, 16, 33, 64):
            x, residual = torch.randn(rows, k, device=device).to(dtype), torch.randn(rows, n, device=device).to(dtype)
            for more in ((None, None), (bias, residual)):
                assert torch.equal(launch_rows(x, weight, *more), linear.launch_linear(x, weight, *more))
