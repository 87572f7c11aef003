"""Products of few rows with 4-bit weights on Hopper, decoded to shared memory: for the bits see ``packed_gluon.py``.

For products with fewer programs than fill the device, where a piece's decoding and its product would follow each other.
Groups of four warps decode pieces of the weight to shared memory, taking turns; four other warps multiply, so that
their sequence of products over K waits for nothing but decoded pieces. One warp loads with the tensor memory
accelerator. Weights are loaded and decoded before the kernel before this one has ended.

It is off: no GPU has run it (:data:`SERVED`). ``python -m benchmarks.four_bits --kernels shared`` compares it with
Triton's kernel and times it.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.gemm.fp8_gluon import load_residual, store_product
from unisono.kernels.gemm.packed_decoding import (
    CHUNKS,
    CHUNKS_32,
    NVFP4_GROUP,
    OF_CHUNKS,
    OF_CHUNKS_32,
    PIECE,
    RAISED,
    SMALLER,
    WIDE,
    e2m1_products,
    e4m3_product,
    integer_pairs,
)
from unisono.kernels.gemm.tile import Tile
from unisono.kernels.hopper import block_barrier, next_stage, stage_barriers
from unisono.kernels.library import AotCase
from unisono.kernels.overlap import overlapped, overlapping

BOX = gl.constexpr(64)
"""Inputs of a box of activations or of decoded weights: in bytes, a row of the widest swizzle."""

W_LAYOUT = gl.NVMMASharedLayout(64, 8, 2)
_BOX_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _load_rows(x_desc, x, bar, stage, piece, token0, ROWS: gl.constexpr):
    mbarrier.expect(bar, PIECE * 2 * ROWS)
    for j in gl.static_range(PIECE // BOX):
        place = x.index(stage * (PIECE // BOX) + j)
        tma.async_copy_global_to_shared(x_desc, [token0, piece * PIECE + j * BOX], bar, place)


@gluon.jit
def _load_weight(w_desc, w, bar, stage, piece, first, OUTPUTS: gl.constexpr):
    mbarrier.expect(bar, PIECE // 2 * OUTPUTS)
    tma.async_copy_global_to_shared(w_desc, [first, piece * (PIECE // 2)], bar, w.index(stage))


@gluon.jit
def _load(x_desc, w_desc, x, w, rows, weights, free, first, token0, pieces, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
          STAGES: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load all pieces. The weight's first ones do not wait. The part of one warp."""
    for i in gl.static_range(STAGES):
        if i < pieces:
            _load_weight(w_desc, w, weights.index(i), i, i, first, OUTPUTS)
    if OVERLAP:
        gdc_wait()
    for i in gl.static_range(STAGES):
        if i < pieces:
            _load_rows(x_desc, x, rows.index(i), i, i, token0, ROWS)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for i in range(STAGES, pieces):
        mbarrier.wait(free.index(stage), phase)
        _load_weight(w_desc, w, weights.index(stage), stage, i, first, OUTPUTS)
        _load_rows(x_desc, x, rows.index(stage), stage, i, token0, ROWS)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _scales(scales, zeros, outputs, piece, GROUP: gl.constexpr, K, NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr,
            GROUPS: gl.constexpr):  # fmt: skip
    """Load what decodes a piece: e4m3 scales [OUTPUTS, 8] of NVFP4, scale and zero of integers [OUTPUTS]."""
    if NVFP4:
        at = piece * (PIECE // 16) + gl.arange(0, PIECE // 16, gl.SliceLayout(0, gl.SliceLayout(2, GROUPS)))
        inside = (at < K // 16)[None, :] & (outputs >= 0)[:, None]
        scale = gl.load(scales + outputs[:, None] * (K // 16) + at[None, :], mask=inside, other=0).to(gl.int16)
        zero = scale
    else:
        groups = (K + GROUP - 1) // GROUP
        at = outputs * groups + gl.minimum(piece * PIECE // GROUP, groups - 1)
        scale = gl.load(scales + at)
        zero = gl.load(zeros + at).to(gl.float32) if HAS_ZEROS else gl.full_like(scale, 8.0)
    return scale, zero


@gluon.jit
def _decoded(held, scale, zero, multiplier, NVFP4: gl.constexpr, DTYPE: gl.constexpr, OUTPUTS: gl.constexpr,
             BYTES: gl.constexpr, GROUPS: gl.constexpr):  # fmt: skip
    """Decode a piece [OUTPUTS, PIECE / 2]: its first and its last BOX inputs."""
    byte = held.load(BYTES).to(gl.int32)
    if NVFP4:
        byte = gl.convert_layout(gl.reshape(byte, [OUTPUTS, PIECE // 16, 8]), GROUPS)
        factor = e4m3_product(scale, multiplier[:, None], DTYPE)
        low, high = e2m1_products(byte, factor[:, :, None], DTYPE)
    else:
        low, high = integer_pairs(byte, scale, zero, DTYPE)
    values = gl.reshape(gl.join(low, high), [OUTPUTS, PIECE // BOX, BOX])
    return gl.split(gl.permute(values, [0, 2, 1]))


@gluon.jit
def _decode(TURN: gl.constexpr, TURNS: gl.constexpr, w, a, weights, decoded, free, scales, zeros, N, K,
            GROUP: gl.constexpr, first, pieces, NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, DTYPE: gl.constexpr,
            OUTPUTS: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr):  # fmt: skip
    """Decode every TURNS-th piece from TURN on. The part of four warps."""
    BYTES: gl.constexpr = CHUNKS if OUTPUTS == WIDE else CHUNKS_32
    GROUPS: gl.constexpr = OF_CHUNKS if OUTPUTS == WIDE else OF_CHUNKS_32
    OF: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, GROUPS) if NVFP4 else BYTES)
    outputs = gl.minimum(first + gl.arange(0, OUTPUTS, OF), N - 1)
    multiplier = outputs
    if NVFP4:
        multiplier = gl.load(zeros + outputs) * (RAISED if gl.bfloat16 == DTYPE else 1.0)
    s0, z0 = _scales(scales, zeros, outputs, TURN, GROUP, K, NVFP4, HAS_ZEROS, GROUPS)
    for piece in range(TURN, pieces, TURNS):
        s1, z1 = _scales(scales, zeros, outputs, piece + TURNS, GROUP, K, NVFP4, HAS_ZEROS, GROUPS)
        stage, place = piece % STAGES, piece % DEPTH
        mbarrier.wait(weights.index(stage), piece // STAGES & 1)
        low, high = _decoded(w.index(stage), s0, z0, multiplier, NVFP4, DTYPE, OUTPUTS, BYTES, GROUPS)
        before = piece - DEPTH  # it had the place
        if before >= 0:
            mbarrier.wait(free.index(before % STAGES), before // STAGES & 1)
        a.index(place * 2).slice(0, OUTPUTS).store(low)
        a.index(place * 2 + 1).slice(0, OUTPUTS).store(high)
        fence_async_shared()
        block_barrier()
        mbarrier.arrive(decoded.index(place))
        s0, z0 = s1, z1


@gluon.jit
def _multiply(x, a, rows, free, decoded, bias, residual, out, M, N, first, token0, pieces,
              NVFP4: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr,
              DEPTH: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
              OVERLAP: gl.constexpr):  # fmt: skip
    """Multiply decoded pieces, sum and store. The part of four warps."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    r = load_residual(residual, first, token0, M, N, HAS_RESIDUAL, ROWS, OUTPUTS, WIDE)
    acc = gl.zeros([WIDE, ROWS], gl.float32, MMA)
    for piece in range(pieces):
        stage, place = piece % STAGES, piece % DEPTH
        mbarrier.wait(rows.index(stage), piece // STAGES & 1)
        mbarrier.wait(decoded.index(place), piece // DEPTH & 1)
        product = warpgroup_mma(a.index(place * 2), x.index(stage * 2).permute([1, 0]), acc, is_async=True)
        product = warpgroup_mma(a.index(place * 2 + 1), x.index(stage * 2 + 1).permute([1, 0]), product, is_async=True)
        acc = warpgroup_mma_wait(2, [product])
        if piece > 0:
            mbarrier.arrive(free.index((piece - 1) % STAGES))
    acc = warpgroup_mma_wait(0, [acc])
    if NVFP4 and gl.bfloat16 == out.dtype.element_ty:
        acc = acc * SMALLER
    store_product(acc, out, bias, r, first, token0, M, N, HAS_BIAS, HAS_RESIDUAL, ROWS, OUTPUTS, WIDE)


@overlapping(reads_early=True)
@gluon.jit
def packed_shared_kernel(x_desc, w_desc, scales, zeros, bias, residual, out, M, N, K, GROUP: gl.constexpr,
                         NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
                         STAGES: gl.constexpr, DEPTH: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr,
                         HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Compute one tile of OUTPUTS outputs and ROWS tokens. STAGES pieces are loaded ahead, and DEPTH decoded."""
    pieces = (K + PIECE - 1) // PIECE
    token0, first = gl.program_id(0) * ROWS, gl.program_id(1) * OUTPUTS
    DTYPE: gl.constexpr = out.dtype.element_ty
    w = gl.allocate_shared_memory(gl.uint8, [STAGES, OUTPUTS, PIECE // 2], w_desc.layout)
    x = gl.allocate_shared_memory(DTYPE, [STAGES * (PIECE // BOX), ROWS, BOX], x_desc.layout)
    a = gl.allocate_shared_memory(DTYPE, [DEPTH * (PIECE // BOX), WIDE, BOX], _BOX_LAYOUT)
    rows, free = stage_barriers(STAGES, 1, 1)
    weights, decoded = stage_barriers(STAGES, 1, 1)
    if OUTPUTS < WIDE:
        nothing = gl.zeros([WIDE - OUTPUTS, BOX], DTYPE, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
        for i in gl.static_range(DEPTH * (PIECE // BOX)):
            a.index(i).slice(OUTPUTS, WIDE - OUTPUTS).store(nothing)
    fence_async_shared()
    block_barrier()
    # Compile-time arguments would become tensors in tuples with a name.
    if TURNS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    x, a, rows, free, decoded, bias, residual, out, M, N, first, token0, pieces, NVFP4, ROWS, OUTPUTS,
                    STAGES, DEPTH, HAS_BIAS, HAS_RESIDUAL, OVERLAP)),
                (_decode, (
                    0, TURNS, w, a, weights, decoded, free, scales, zeros, N, K, GROUP, first, pieces, NVFP4, HAS_ZEROS,
                    DTYPE, OUTPUTS, STAGES, DEPTH)),
                (_decode, (
                    1, TURNS, w, a, weights, decoded, free, scales, zeros, N, K, GROUP, first, pieces, NVFP4, HAS_ZEROS,
                    DTYPE, OUTPUTS, STAGES, DEPTH)),
                (_load, (
                    x_desc, w_desc, x, w, rows, weights, free, first, token0, pieces, ROWS, OUTPUTS, STAGES, OVERLAP)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    x, a, rows, free, decoded, bias, residual, out, M, N, first, token0, pieces, NVFP4, ROWS, OUTPUTS,
                    STAGES, DEPTH, HAS_BIAS, HAS_RESIDUAL, OVERLAP)),
                (_decode, (
                    0, TURNS, w, a, weights, decoded, free, scales, zeros, N, K, GROUP, first, pieces, NVFP4, HAS_ZEROS,
                    DTYPE, OUTPUTS, STAGES, DEPTH)),
                (_decode, (
                    1, TURNS, w, a, weights, decoded, free, scales, zeros, N, K, GROUP, first, pieces, NVFP4, HAS_ZEROS,
                    DTYPE, OUTPUTS, STAGES, DEPTH)),
                (_decode, (
                    2, TURNS, w, a, weights, decoded, free, scales, zeros, N, K, GROUP, first, pieces, NVFP4, HAS_ZEROS,
                    DTYPE, OUTPUTS, STAGES, DEPTH)),
                (_load, (
                    x_desc, w_desc, x, w, rows, weights, free, first, token0, pieces, ROWS, OUTPUTS, STAGES, OVERLAP)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def launch_packed_shared(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: Tile,
) -> torch.Tensor:
    """Launch the kernel: see ``packed_gluon.launch_packed_rows``."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    (rows, k), n, nvfp4 = x.shape, weight.shape[0], group == NVFP4_GROUP
    out = x.new_empty(rows, n)
    packed_shared_kernel[(triton.cdiv(rows, tile.m), triton.cdiv(n, tile.n))](
        TensorDescriptor.from_tensor(x, [tile.m, BOX.value], _BOX_LAYOUT.value),
        TensorDescriptor.from_tensor(weight, [tile.n, PIECE.value // 2], W_LAYOUT),
        scales, zeros, bias, residual, out, rows, n, k, GROUP=group, NVFP4=nvfp4,
        HAS_ZEROS=zeros is not None and not nvfp4, **_sizes(tile), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, num_warps=4, maxnreg=tile.registers, **overlapped(x.device),
    )  # fmt: skip
    return out


def _sizes(tile: Tile) -> dict[str, int | None]:
    """Compile-time arguments of a tile. Raises ValueError for too few stages.

    A group that waits for a stage knows that its earlier piece is there only from what the group has waited for: its
    own last piece, TURNS before, and the place that was free for it, DEPTH before that.
    """
    turns, depth = tile.warps // 4 - 1, tile.stages // 2  # with the warp that loads, warps count in fours
    if tile.stages < turns + depth:
        raise ValueError(f"{tile.stages} stages: {turns} groups that decode need {2 * turns}")
    return {
        "ROWS": tile.m,
        "OUTPUTS": tile.n,
        "STAGES": tile.stages,
        "DEPTH": depth,
        "TURNS": turns,
        "REGISTERS": tile.registers,
    }


def _case(dtype: str, tile: Tile, nvfp4: bool, zeros: bool, bias: bool) -> AotCase:
    signature = {
        "x_desc": f"tensordesc<{dtype}[{tile.m}, {BOX.value}],{_BOX_LAYOUT.value!r}>",
        "w_desc": f"tensordesc<u8[{tile.n}, {PIECE.value // 2}],{W_LAYOUT!r}>",
        "scales": "*u8" if nvfp4 else "*fp32", "zeros": "*fp32" if nvfp4 else "*i8",
        **dict.fromkeys(("bias", "residual", "out"), f"*{dtype}"),
        **dict.fromkeys(("M", "N", "K"), "i32"),
    }  # fmt: skip
    options = {
        "GROUP": NVFP4_GROUP if nvfp4 else 128,
        "NVFP4": nvfp4,
        "HAS_ZEROS": zeros,
        "HAS_BIAS": bias,
        "HAS_RESIDUAL": True,
        "OVERLAP": True,
    }
    return AotCase(packed_shared_kernel, signature, _sizes(tile) | options, num_warps=4, maxnreg=tile.registers)


SERVED = False
"""True: products of few outputs run on this kernel, if the start finds the Triton kernel's bits."""

_FEW = 132 * 32
"""Outputs up to which programs of 32 are no more than an H200's multiprocessors."""

_TILES = {
    (16, True): Tile(16, 32, PIECE.value, 12, 8, registers=104),
    (16, False): Tile(16, 64, PIECE.value, 16, 8, registers=96),
    (64, True): Tile(64, 32, PIECE.value, 12, 6, registers=104),
}
"""Tiles by rows, and whether there are at most _FEW outputs; not timed."""


def shared_tile(rows: int, n: int) -> Tile | None:
    """The tile of this kernel for a number of rows and outputs; None: that of ``packed_gluon.py`` serves."""
    return _TILES.get((16 if rows <= 16 else 64, n <= _FEW)) if SERVED and n <= 2 * _FEW else None


AOT = [
    *(
        _case("bf16", tile, nvfp4, zeros, False)
        for tile in _TILES.values()
        for nvfp4, zeros in ((False, False), (False, True), (True, False))
    ),
    _case("fp16", _TILES[16, True], False, True, True),
    _case("fp16", _TILES[16, True], True, False, True),
]
