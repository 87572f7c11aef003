"""Matrix products whose bits do not depend on the batch, and their fused bias and residual.

Owns the ``linear`` op. Every product accumulates K in one sequence in fp32, so a row's bits depend on
the row and the weight alone: never on the number of rows, the tile or the backend. Small M runs on one Triton
kernel; large M runs on cuBLASLt with split-K forbidden, which sums in the same order (measured on an
H200). :data:`exact_blas` checks this on the present GPU for a weight's shape; a shape without that
proof stays on Triton. Called by ``layers``; the engine's start calls :func:`configure_exact_blas` and
proves the shapes.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from unisono.kernels.cards import HOPPER, fitting_stages, shared_memory
from unisono.kernels.gemm.cpu import row_exact_product
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.library import DTYPES, AotCase, op
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.proofs import ExactKernel

TRITON_ROWS = 64
"""Up to this many rows the Triton kernel runs; above it cuBLASLt does, if it is proven exact."""

PROOF_ROWS = (65, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048)
"""Numbers of rows at which cuBLASLt is compared with the Triton kernel: it chooses an algorithm for each."""


_OUTPUTS = (512, 2112, 4224, 8192, 16383)
"""Maximum outputs of the tiles below. The first: a router's, few programs that read all of their weight at once. The
second: one program of 16 outputs for each of 132 multiprocessors.
"""

_TILES = {  # maximum rows -> a tile for each number of outputs, and one for more
    16: (
        Tile(16, 16, 512, 2, 6), Tile(16, 16, 512, 2, 4), Tile(16, 16, 512, 2, 4), Tile(16, 64, 256, 4, 4),
        Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4),
    ),
    32: (
        Tile(32, 16, 512, 2, 4), Tile(32, 16, 512, 2, 4), Tile(32, 64, 128, 4, 6, swapped=True),
        Tile(32, 64, 128, 4, 4, swapped=True), Tile(32, 64, 128, 4, 4, swapped=True),
        Tile(32, 64, 128, 4, 3, swapped=True),
    ),
    64: (
        Tile(64, 16, 256, 4, 4), Tile(64, 16, 256, 4, 4), Tile(64, 32, 256, 4, 4), Tile(64, 64, 128, 4, 5),
        Tile(64, 32, 64, 4, 5), Tile(64, 64, 64, 4, 4),
    ),
}  # fmt: skip

ROW_TILES = tuple(_TILES)
"""Numbers of rows that exactly fill a tile of the Triton kernel."""


def linear_tile(rows: int, n: int, dtype: torch.dtype, shared: int = HOPPER) -> Tile:
    """Choose the fastest known tile for ``rows`` and ``n`` outputs on an H200 (benchmarks/kernels.py, *tune*), with the
    stages that fit into ``shared`` bytes."""
    tile = _hopper_tile(rows, n, dtype)
    step = (tile.m + tile.n) * tile.k * dtype.itemsize
    return tile._replace(stages=fitting_stages(tile.stages, step, shared))


def _hopper_tile(rows: int, n: int, dtype: torch.dtype) -> Tile:
    if dtype is torch.float32:
        return Tile(16, 32, 64, 4, 2) if rows <= 16 else Tile(64, 64, 32, 4, 2)
    for most, tiles in _TILES.items():
        if rows <= most:
            return tiles[bisect.bisect_left(_OUTPUTS, n)]
    if n <= 512:  # a router's: tiles of 128 × 128 would leave multiprocessors without one
        return Tile(64, 32, 128, 4, 4) if rows <= 1024 else Tile(128, 64, 64, 4, 4)
    return Tile(128, 128, 64, 8, 4)


@triton.jit
def residual_tile(residual, rows, cols, M, N, HAS_RESIDUAL: tl.constexpr):
    """Load the residual [rows, cols] that :func:`store_sums` adds, if any."""
    if HAS_RESIDUAL:
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        return tl.load(residual + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=inside, other=0.0)
    else:
        return 0


@triton.jit
def store_sums(acc, out, bias, r, rows, cols, M, N, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Store fp32 products [rows, cols] of out [M, N], plus the bias, plus the residual r.

    They are rounded before every addition, as in the unfused path, which serves large M.
    """
    row_ok, col_ok = rows < M, cols < N
    y = acc.to(out.dtype.element_ty)
    if HAS_BIAS:
        b = tl.load(bias + cols, mask=col_ok, other=0.0)
        y = (y.to(tl.float32) + b.to(tl.float32)[None, :]).to(y.dtype)
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    inside = row_ok[:, None] & col_ok[None, :]
    if HAS_RESIDUAL:
        y = (y.to(tl.float32) + r.to(tl.float32)).to(y.dtype)
    tl.store(out + at, y, mask=inside)


@triton.jit
def tile_product(x_rows, w_rows, row_ok, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 SWAPPED: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """Multiply rows of x by rows of the weight over K, in one sequence: fp32 [BLOCK_M, BLOCK_N].

    x_rows [BLOCK_M], w_rows [BLOCK_N]: pointers to the rows. Rows of x that are not ``row_ok`` [BLOCK_M] are 0.
    """
    ks = tl.arange(0, BLOCK_K)
    if SWAPPED:
        x_ptrs, w_ptrs = x_rows[None, :] + ks[:, None], w_rows[:, None] + ks[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        x_ptrs, w_ptrs = x_rows[:, None] + ks[None, :], w_rows[None, :] + ks[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        # Absent rows are not read at all: re-reading one row in all programs at once stalls the L2.
        x_ok, w_ok = row_ok[None, :] if SWAPPED else row_ok[:, None], None
        if not EVEN_K:
            k_ok = ks < K - start
            x_ok &= k_ok[:, None] if SWAPPED else k_ok[None, :]
            w_ok = k_ok[None, :] if SWAPPED else k_ok[:, None]
        x_tile = tl.load(x_ptrs, mask=x_ok, other=0.0)
        w_tile = tl.load(w_ptrs) if EVEN_K else tl.load(w_ptrs, mask=w_ok, other=0.0)
        if SWAPPED:
            acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return tl.trans(acc) if SWAPPED else acc


@triton.jit
def _linear_kernel(x, weight, bias, residual, out, M, N, K,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAPPED: tl.constexpr,
                   EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                   OVERLAP: tl.constexpr):  # fmt: skip
    # Row tiles of one weight tile are neighbours in the grid, so that the weight is read from memory once.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < M
    x_rows = x + rows.to(tl.int64) * K
    # The last weight tile repeats the last row: that is cheaper than a mask, and the result is not stored.
    w_rows = weight + tl.minimum(cols, N - 1).to(tl.int64) * K
    follow(OVERLAP)
    r = residual_tile(residual, rows, cols, M, N, HAS_RESIDUAL)  # while the product is computed
    acc = tile_product(x_rows, w_rows, row_ok, K, BLOCK_M, BLOCK_N, BLOCK_K, SWAPPED, EVEN_K)
    store_sums(acc, out, bias, r, rows, cols, M, N, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _add_kernel(y, bias, residual, N, total, BLOCK: tl.constexpr,
                HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    value = tl.load(y + at, mask=inside)
    if HAS_BIAS:
        b = tl.load(bias + at % N, mask=inside, other=0.0)
        value = (value.to(tl.float32) + b.to(tl.float32)).to(value.dtype)
    if HAS_RESIDUAL:
        r = tl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + r.to(tl.float32)).to(value.dtype)
    tl.store(y + at, value, mask=inside)


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: Tile | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Launch the Triton product at any M. tile: overrides the blocking (speed only). out_dtype: None: that of x."""
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    (rows, k), n = x.shape, weight.shape[0]
    tile = tile or linear_tile(rows, n, x.dtype, shared_memory(x.device))
    out = x.new_empty(rows, n, dtype=out_dtype)
    grid = (triton.cdiv(rows, tile.m), triton.cdiv(n, tile.n))
    _linear_kernel[grid](
        x, weight, bias, residual, out, rows, n, k,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, SWAPPED=tile.swapped, EVEN_K=k % tile.k == 0,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=tile.warps, num_stages=tile.stages, **overlapped(x.device),
    )  # fmt: skip
    return out


def launch_add(y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
    """Add ``bias [N]``, then ``residual [M, N]``, to ``y [M, N]`` in place, rounding after each."""
    residual = None if residual is None else residual.contiguous()
    grid = (triton.cdiv(y.numel(), 1024),)
    _add_kernel[grid](
        y, bias, residual, y.shape[1], y.numel(),
        BLOCK=1024, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, **overlapped(y.device),
    )  # fmt: skip
    return y


@functools.cache
def configure_exact_blas() -> None:
    """Configure torch's CUDA BLAS to sum K in one sequence: cuBLASLt, no split-K, no reduced precision.

    Process-wide; does nothing without a GPU. Call it before the first matrix product on one: cuBLASLt reads its
    workspace size once.
    """
    if not torch.cuda.is_available():
        return
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"  # KiB: no room for partial sums
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    # (reduced-precision reductions, split-K)
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")


def blas_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """Compute the cuBLASLt product at any M, with the same epilogue roundings."""
    configure_exact_blas()
    y = torch.mm(x, weight.t())
    return y if bias is None and residual is None else launch_add(y, bias, residual)


def _blas_keys(weight: torch.Tensor, rows: tuple[int, ...] = PROOF_ROWS) -> tuple[Hashable, ...]:
    """(N, K, dtype) of a weight [N, K]; nothing where cuBLASLt is never used: fp32, CPU."""
    if weight.device.type != "cuda" or weight.dtype is torch.float32:
        return ()
    return ((*weight.shape, weight.dtype),)


def _same_bits(weight: torch.Tensor, rows: tuple[int, ...] = PROOF_ROWS) -> bool:
    """Compare both products of ``weight [N, K]`` with random inputs of each number of rows."""
    tile = linear_tile(1, weight.shape[0], weight.dtype, shared_memory(weight.device))
    for count in rows:
        generator = torch.Generator(weight.device).manual_seed(count)
        x = torch.randn(count, weight.shape[1], device=weight.device, generator=generator).to(weight.dtype)
        if not torch.equal(blas_linear(x, weight, None, None), launch_linear(x, weight, None, None, tile)):
            return False
    return True


exact_blas = ExactKernel("cuBLASLt products", _blas_keys, _same_bits)
"""cuBLASLt's products above TRITON_ROWS rows. A shape with other bits runs on Triton at every M: slower, still exact.

Drafter and target share the proof of a shape.
"""


def runs_on_blas(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if cuBLASLt computes this product, False if the Triton kernel does."""
    return x.shape[0] > TRITON_ROWS and exact_blas.serves((*weight.shape, weight.dtype))


def linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    if runs_on_blas(x, weight):
        return blas_linear(x, weight, bias, residual)
    return launch_linear(x, weight, bias, residual)


def linear_formula(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute :func:`linear` with a gradient; under autocast dtypes may differ."""
    y = torch.nn.functional.linear(x, weight, bias)
    return y if residual is None else y + residual


@op(cuda=linear_cuda, shape=lambda x, weight: (x.shape[0], weight.shape[0]), gradient=linear_formula)
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute ``x [M, K] @ weight [N, K]^T (+ bias [N]) (+ residual [M, N])``: [M, N], in the inputs' one dtype.

    bf16, fp16 or fp32; fp32 accumulation over K in one sequence. The product is rounded to the dtype,
    then the bias is added and rounded, then the residual. A row's bits depend on that row, the weight,
    its bias and its residual only.
    """
    y = row_exact_product(x, weight)
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


def _aot_linear(shared: int, dtype: str, rows: int, n: int, even_k: bool, bias: bool, residual: bool) -> AotCase:
    tile = linear_tile(rows, n, DTYPES[dtype], shared)
    pointers = {name: f"*{dtype}" for name in ("x", "weight", "bias", "residual", "out")}
    return AotCase(
        _linear_kernel,
        {**pointers, "M": "i32", "N": "i32", "K": "i32"},
        {
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "SWAPPED": tile.swapped,
            "EVEN_K": even_k, "HAS_BIAS": bias, "HAS_RESIDUAL": residual, "OVERLAP": True,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


_ADD = AotCase(
    _add_kernel,
    {"y": "*bf16", "bias": "*bf16", "residual": "*bf16", "N": "i32", "total": "i32"},
    {"BLOCK": 1024, "HAS_BIAS": True, "HAS_RESIDUAL": True, "OVERLAP": True},
)


def aot(shared: int) -> list[AotCase]:
    """AotCases of a card with ``shared`` bytes of shared memory."""
    sizes = [(rows, n) for rows in _TILES for n in (2048, 4096, 6144, 12288, 151936)]
    sizes += [(1, 128), (256, 4096), (256, 257), (2048, 257)]
    return [
        *(_aot_linear(shared, "bf16", rows, n, True, False, True) for rows, n in sizes),
        *(_aot_linear(shared, dtype, rows, 4096, False, True, True) for dtype in DTYPES for rows in (1, 64)),
        _ADD,
    ]


AOT = aot(HOPPER)
