"""Products of experts with 4-bit weights on Hopper: the bits of the Triton kernels in ``integers.py`` and ``nvfp4.py``.

As in ``kernels/gemm/packed_gluon.py`` four warps decode a piece of the weight to registers, in the layout of wgmma's
left operand, while the product of the piece before it runs. A piece is decoded once for all pairs of a tile: 16 of them
in rounds, up to 128 in prompts. The tensor memory accelerator loads packed weights; the pairs' rows are scattered, so
four more warps copy them row by row. With GROUPS = 2, two groups of four warps have the same rows and other outputs.

The sum over K is one sequence, as in Triton's kernels. The kernel is launched where :class:`PackedExperts` found
their bits.

Shapes: as in ``kernels/moe/nvfp4.py``. A product has K inputs and N outputs; gate and up have N each, which are
combined.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from unisono.kernels.gemm.packed_decoding import NVFP4_GROUP, PIECE, WIDE, of_scales
from unisono.kernels.gemm.packed_gluon import BOX, W_LAYOUT, sum_of_pieces
from unisono.kernels.gemm.persistent import processors
from unisono.kernels.gemm.tile import ExpertTiles, Tile
from unisono.kernels.hopper import block_barrier, next_stage, stage_barriers
from unisono.kernels.library import AotCase, ints
from unisono.kernels.moe.experts import Products, same_products
from unisono.kernels.moe.gluon import relu_squared
from unisono.kernels.moe.plan import LEAD_PAIRS, ExpertPlan, Shapes
from unisono.kernels.overlap import follow, overlapped
from unisono.kernels.proofs import ExactKernel

LOADERS = gl.constexpr(128)
"""Threads that load. All of them copy, and arrive when their copies are done."""

_LOADERS_REGISTERS = 40

_X_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))

_PAIRS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""Pairs of a plan that is not sorted: each warp has all."""


@gluon.jit
def _tile(ids, order, tiles, t, M, count, r, E: gl.constexpr, TOP_K: gl.constexpr, ROWS: gl.constexpr,
          RIDES: gl.constexpr, LEAD: gl.constexpr):  # fmt: skip
    """(expert, number of pairs n, pairs at places r) of tile ``t``: ``plan.tile_rows`` and ``plan.tile_pairs``.

    A token has an expert once, so that ROWS places suffice where the plan is not sorted: see :func:`rows_of`.
    """
    pairs = M * TOP_K
    if LEAD:
        p = gl.arange(0, 128, _PAIRS)
        every = gl.load(ids + p, mask=p < pairs, other=-1)
        e = gl.load(ids + t, mask=t < pairs, other=E)
        same = every == e
        before = gl.min(gl.where(same, p, 128), 0)
        leads = (before == t) & (e < E)
        n = gl.where(t < pairs, gl.where(leads, gl.sum(same.to(gl.int32), 0), 0), M)
        pair = pairs + r
        if leads:
            pair = gl.where(r == 0, before, pair)
            for i in range(1, n):
                before = gl.min(gl.where(same & (p > before), p, 128), 0)
                pair = gl.where(r == i, before, pair)
    else:
        shared = (M + ROWS - 1) // ROWS if RIDES else 0
        listed = t >= shared
        at = tiles + gl.maximum(t - shared, 0)
        e, first, n = gl.load(at), gl.load(at + count), gl.load(at + 2 * count)
        e, n = gl.where(listed, e, E), gl.where(listed, n, gl.minimum(M - t * ROWS, ROWS))
        own = gl.load(order + first + r, mask=(r < n) & listed, other=0)
        pair = gl.where(listed, own, pairs + t * ROWS + r)
    return e, n, pair


@gluon.jit
def _first_output(part, group, GATED: gl.constexpr, OUTPUTS: gl.constexpr, GROUPS: gl.constexpr):
    return (part * GROUPS + group) * (OUTPUTS // 2 if GATED else OUTPUTS)


@gluon.jit
def _rows(e, column, r, N: gl.constexpr, GATED: gl.constexpr, OUTPUTS: gl.constexpr):
    """Rows r of a group's weight in the stack. The last outputs repeat."""
    HALF: gl.constexpr = OUTPUTS // 2
    if GATED:
        return e * (2 * N) + gl.minimum(column + r % HALF, N - 1) + r // HALF * N
    else:
        return e * N + gl.minimum(column + r, N - 1)


@gluon.jit
def _load(x, w_desc, held, w, rows, full, free, e, n, part, M, K: gl.constexpr, N: gl.constexpr, TOP_K: gl.constexpr,
          BY_TOKEN: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
          GROUPS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load all pieces. BY_TOKEN: x has a row for each token. The part of four warps."""
    if OVERLAP:
        gdc_wait()
    HALF: gl.constexpr = OUTPUTS // 2
    PIECES: gl.constexpr = (K + PIECE - 1) // PIECE
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if n > 0:
        pair = held.load(gl.SliceLayout(1, layout))
        if BY_TOKEN:
            pair = gl.where(pair < M * TOP_K, pair // TOP_K, pair - M * TOP_K)
        there = (gl.arange(0, ROWS, gl.SliceLayout(1, layout)) < n)[:, None]
        k = gl.arange(0, BOX, gl.SliceLayout(0, layout))
        at = x + (pair.to(gl.int64) * K)[:, None] + k[None, :]
        stage, phase = gl.to_tensor(0), gl.to_tensor(1)
        for piece in range(PIECES):
            mbarrier.wait(free.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, GROUPS * OUTPUTS * (PIECE // 2))
            for group in gl.static_range(GROUPS):
                left = e * (2 * N if GATED else N) + _first_output(part, group, GATED, OUTPUTS, GROUPS)
                right = left + (N if GATED else HALF)
                weight = w.index(stage * GROUPS + group)
                tma.async_copy_global_to_shared(w_desc, [left, piece * (PIECE // 2)], bar, weight.slice(0, HALF))
                tma.async_copy_global_to_shared(w_desc, [right, piece * (PIECE // 2)], bar, weight.slice(HALF, HALF))
            for j in gl.static_range(PIECE // BOX):
                first = piece * PIECE + j * BOX
                inside = there if K % PIECE == 0 else there & (k < K - first)[None, :]
                async_copy.async_copy_global_to_shared(rows.index(stage * (PIECE // BOX) + j), at + first, mask=inside)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _store(out, value, held, n, column, N: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Store value [ROWS, outputs] as columns from ``column`` on of the pairs' rows of out [pairs, N]."""
    column += gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    pair = held.load(gl.SliceLayout(1, LAYOUT))
    there = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) < n
    at = (pair.to(gl.int64) * N)[:, None] + column[None, :]
    gl.store(out + at, gl.convert_layout(value, LAYOUT), mask=there[:, None] & (column < N)[None, :])


@gluon.jit
def _finish(acc, out, held, n, column, N: gl.constexpr, GATED: gl.constexpr, UP: gl.constexpr, ROWS: gl.constexpr,
            OUTPUTS: gl.constexpr):  # fmt: skip
    """Round the sums [OUTPUTS, ROWS], combine gate and up or square, and store."""
    dtype: gl.constexpr = out.dtype.element_ty
    if GATED:
        BOTH: gl.constexpr = gl.BlockedLayout([1, 4, 2], [4, 8, 1], [4, 1, 1], [2, 1, 0])
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
        both = gl.permute(gl.reshape(acc.to(dtype), [2, OUTPUTS // 2, ROWS]), [2, 1, 0])
        gate, up = gl.split(gl.convert_layout(both, BOTH))
        gate, up = gate.to(gl.float32), up.to(gl.float32)  # activation.silu_product
        silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        _store(out, (silu * up).to(dtype), held, n, column, N, ROWS, LAYOUT)
    else:
        WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        y = gl.permute(acc.to(dtype), [1, 0])
        if UP:
            y = relu_squared(y)
        _store(out, y, held, n, column, N, ROWS, WHOLE)


@gluon.jit
def _multiply(GROUP: gl.constexpr, scales, zeros, out, held, w, rows, full, free, e, n, part, INPUTS: gl.constexpr,
              K: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, UP: gl.constexpr, NVFP4: gl.constexpr,
              HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, GROUPS: gl.constexpr,
              STAGES: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Decode, multiply, sum and store a group's outputs. The part of four warps. INPUTS: that share a scale."""
    if OVERLAP:
        gdc_wait()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DTYPE: gl.constexpr = out.dtype.element_ty
    PIECES: gl.constexpr = (K + PIECE - 1) // PIECE
    if n > 0:
        column = _first_output(part, GROUP, GATED, OUTPUTS, GROUPS)
        outputs = _rows(e, column, of_scales(NVFP4, OUTPUTS), N, GATED, OUTPUTS)
        multiplier = outputs
        if NVFP4:
            multiplier = gl.load(zeros + outputs)
        acc = sum_of_pieces(rows, w, GROUP, full, free, scales, zeros, outputs, multiplier, PIECES, INPUTS, K, NVFP4,
                            HAS_ZEROS, ROWS, OUTPUTS, GROUPS, STAGES, DTYPE, MMA)  # fmt: skip
        _finish(acc, out, held, n, column, N, GATED, UP, ROWS, OUTPUTS)


@gluon.jit(do_not_specialize=["M", "count"])
def packed_experts_kernel(x, w_desc, scales, zeros, out, ids, order, tiles, M, count, INPUTS: gl.constexpr,
                          K: gl.constexpr, N: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, RIDES: gl.constexpr,
                          LEAD: gl.constexpr, GATED: gl.constexpr, UP: gl.constexpr, PARTS: gl.constexpr,
                          NVFP4: gl.constexpr, HAS_ZEROS: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
                          GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
                          OVERLAP: gl.constexpr):  # fmt: skip
    """Multiply the pairs of one tile by OUTPUTS * GROUPS rows of their expert's weight.

    ids, order, tiles, M, count: fields of an :class:`ExpertPlan`. GATED: out [pairs, N] is ``silu(gate) * up``; else x
    has a row for each pair, or with UP for each token, and the product is squared.
    """
    follow(OVERLAP)
    t, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    of_rows: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    e, n, pair = _tile(ids, order, tiles, t, M, count, gl.arange(0, ROWS, of_rows), E, TOP_K, ROWS, RIDES, LEAD)
    held = gl.allocate_shared_memory(gl.int32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    held.store(pair)
    w = gl.allocate_shared_memory(gl.uint8, [STAGES * GROUPS, OUTPUTS, PIECE // 2], w_desc.layout)
    rows = gl.allocate_shared_memory(out.dtype.element_ty, [STAGES * (PIECE // BOX), ROWS, BOX], _X_LAYOUT)
    full, free = stage_barriers(STAGES, LOADERS + 1, GROUPS)
    fence_async_shared()
    block_barrier()
    BY_TOKEN: gl.constexpr = GATED or UP
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, scales, zeros, out, held, w, rows, full, free, e, n, part, INPUTS, K, N, GATED, UP, NVFP4,
                    HAS_ZEROS, ROWS, OUTPUTS, GROUPS, STAGES, OVERLAP)),
                (_load, (
                    x, w_desc, held, w, rows, full, free, e, n, part, M, K, N, TOP_K, BY_TOKEN, GATED, ROWS,
                    OUTPUTS, GROUPS, STAGES, OVERLAP)),
            ],
            [4],
            [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, scales, zeros, out, held, w, rows, full, free, e, n, part, INPUTS, K, N, GATED, UP, NVFP4,
                    HAS_ZEROS, ROWS, OUTPUTS, GROUPS, STAGES, OVERLAP)),
                (_multiply, (
                    1, scales, zeros, out, held, w, rows, full, free, e, n, part, INPUTS, K, N, GATED, UP, NVFP4,
                    HAS_ZEROS, ROWS, OUTPUTS, GROUPS, STAGES, OVERLAP)),
                (_load, (
                    x, w_desc, held, w, rows, full, free, e, n, part, M, K, N, TOP_K, BY_TOKEN, GATED, ROWS,
                    OUTPUTS, GROUPS, STAGES, OVERLAP)),
            ],
            [4, 4],
            [REGISTERS, 40],
        )  # fmt: skip


TILES = {
    16: ExpertTiles(Tile(16, 64, 128, 8, 6, registers=80), Tile(16, 64, 128, 8, 6, registers=80)),
    32: ExpertTiles(Tile(32, 64, 128, 8, 4, registers=80), Tile(32, 64, 128, 8, 4, registers=80)),
    64: ExpertTiles(Tile(64, 64, 128, 8, 3, registers=80), Tile(64, 64, 128, 8, 3, registers=80)),
    128: ExpertTiles(Tile(128, 128, 128, 12, 4, registers=168), Tile(128, 64, 128, 8, 3, registers=128)),
}
"""Fastest tiles on an H200 for 35B-A3B, by rows. warps: with those that load."""

_FEW_PAIRS = 64
_DOWN_OF_MORE = Tile(16, 64, 128, 8, 4, registers=64)
"""A tile of 16 rows, for more than _FEW_PAIRS pairs: a multiprocessor has one program more."""


def _tile_of(rows: int, gated: bool, pairs: int) -> Tile:
    if rows == 16 and not gated and pairs > _FEW_PAIRS:
        return _DOWN_OF_MORE
    return TILES[rows].up if gated else TILES[rows].down


def rows_of(plan: ExpertPlan) -> int:
    """Rows of the kernel's tiles: the plan's, or where it is not sorted as many as an expert may have."""
    return plan.tile if plan.tiles is not None else max(16, triton.next_power_of_2(len(plan.ids)))


def suits(rows: int, weight: torch.Tensor, group: int, dtype: torch.dtype) -> bool:
    """Return True if the kernel can multiply tiles of this number of rows by the packed stack [E, N, K / 2].

    group: inputs that share a scale. dtype: of activations.
    """
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[2] % 32 == 0
    whole = group == NVFP4_GROUP or group % PIECE.value == 0 or group >= 2 * weight.shape[2]
    small = weight.shape[0] * weight.shape[1] * -(-2 * weight.shape[2] // min(group, 64)) < 2**31
    fits = rows in TILES and dtype is not torch.float32
    return fits and aligned and whole and small and processors(weight.device) > 0


def launch_packed_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    plan: ExpertPlan,
    gated: bool,
    up: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute gate and up (gated), the square of up's product, or down: [pairs, N]. :func:`suits` must hold.

    group: NVFP4_GROUP: scales are uint8 [E, N, K / 16] and zeros are the multipliers of ``nvfp4.expert_nvfp4_down``.
    """
    x, (m, top_k), rides = x.contiguous(), plan.ids.shape, len(weight) - plan.experts
    n, k, nvfp4 = weight.shape[1] // (1 + gated), 2 * weight.shape[2], group == NVFP4_GROUP
    tile, lead = tile or _tile_of(rows_of(plan), gated, m * top_k), plan.tiles is None
    sizes = _sizes(Shapes(m, 0, 0, plan.experts, top_k, rides > 0), k, n, gated, up, lead, tile)
    tiles = plan.listed + (rides if lead else rides * triton.cdiv(m, tile.m))
    out = x.new_empty(m * top_k + rides * m, n)
    packed_experts_kernel[(tiles * sizes["PARTS"],)](
        x, TensorDescriptor.from_tensor(weight.view(-1, k // 2), _box(tile), W_LAYOUT),
        scales.view(torch.int32) if nvfp4 else scales, zeros, out, *plan.operands, INPUTS=group, **sizes, NVFP4=nvfp4,
        HAS_ZEROS=zeros is not None and not nvfp4, num_warps=4, maxnreg=tile.registers, **overlapped(x.device),
    )  # fmt: skip
    return out


def _sizes(shapes: Shapes, k: int, n: int, gated: bool, up: bool, lead: bool, tile: Tile) -> dict[str, Any]:
    """Compile-time arguments of the kernel, without those of the weight's format."""
    outputs = min(tile.n, WIDE.value)
    return {
        "K": k, "N": n, "E": shapes.experts, "TOP_K": shapes.top_k, "RIDES": shapes.rides, "LEAD": lead,
        "GATED": gated, "UP": up, "PARTS": triton.cdiv(n, tile.n // (1 + gated)), "ROWS": tile.m, "OUTPUTS": outputs,
        "GROUPS": tile.n // outputs, "STAGES": tile.stages, "REGISTERS": _registers(tile),
    }  # fmt: skip


def _box(tile: Tile) -> list[int]:
    """Rows and bytes of the weight that are loaded together: half of a group's outputs."""
    return [min(tile.n, WIDE.value) // 2, PIECE.value // 2]


def _registers(tile: Tile) -> int:
    """Registers of a thread that multiplies: warps that load leave theirs."""
    return ((tile.registers or 0) * tile.warps - 4 * _LOADERS_REGISTERS) // (tile.warps - 4) // 8 * 8


class PackedExperts(ExactKernel[...]):
    """The kernel here in place of a format's Triton kernels.

    Arguments of a comparison: operands of the stack of gate and up, those of down, dtype of activations, experts,
    top_k, and True if there are gates. fitted(*operands): those of :func:`launch_packed_experts`. gate_up, up,
    down(x, *operands, plan): the Triton kernels.
    """

    def __init__(
        self,
        name: str,
        fitted: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]],
        gate_up: Callable[..., torch.Tensor],
        up: Callable[..., torch.Tensor],
        down: Callable[..., torch.Tensor],
    ) -> None:
        super().__init__(name, self._keys_of, self._same_bits)
        self._fitted, self._gate_up, self._up, self._down = fitted, gate_up, up, down

    def runs(self, x: torch.Tensor, plan: ExpertPlan, gated: bool, *operands: Any) -> bool:
        """Return True if the kernel serves this product."""
        weight, _, zeros, group = self._fitted(*operands)
        serves = self.serves(_key(weight, zeros, group, x.dtype, gated))
        return serves and suits(rows_of(plan), weight, group, x.dtype)

    def launch(self, x: torch.Tensor, plan: ExpertPlan, gated: bool, up: bool, *operands: Any) -> torch.Tensor:
        """Launch the kernel: see :func:`launch_packed_experts`."""
        return launch_packed_experts(x, *self._fitted(*operands), plan, gated, up)

    def _keys_of(
        self, gate_up: Any, down: Any, dtype: torch.dtype, _: int, __: int, gated: bool
    ) -> tuple[Hashable, ...]:
        first, second = self._fitted(*gate_up), self._fitted(*down)
        if first[0].device.type != "cuda":
            return ()
        return tuple(_key(w, zeros, group, dtype, g) for (w, _, zeros, group), g in ((first, gated), (second, False)))

    def _same_bits(self, gate_up: Any, down: Any, dtype: torch.dtype, experts: int, top_k: int, gated: bool) -> bool:
        """Compare both products in tiles of each number of rows, and in a plan that is not sorted."""
        stacks = [self._fitted(*operands) for operands in (gate_up, down)]
        inputs = 2 * stacks[0][0].shape[2], 2 * stacks[1][0].shape[2]
        plain = self._gate_up if gated else self._up
        ours = Products(16, lambda x, plan: plain(x, *gate_up, plan), lambda h, plan: self._down(h, *down, plan))
        few = max(LEAD_PAIRS // top_k, 1)
        for rows, tokens in (*((rows, None) for rows in TILES), (16, few)):
            if not all(suits(rows, weight, group, dtype) for weight, _, _, group in stacks):
                return False
            other = Products(
                rows,
                lambda x, plan: self.launch(x, plan, gated, not gated, *gate_up),
                lambda h, plan: self.launch(h, plan, False, False, *down),
            )
            if not same_products(ours, other, inputs, dtype, experts, top_k, stacks[0][0].device, tokens):
                return False
        return True


def _key(
    weight: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype, gated: bool
) -> tuple[Hashable, ...]:
    return weight.shape, zeros is None, group, dtype, gated


def _case(
    dtype: str, shapes: Shapes, gated: bool, up: bool, lead: bool, rows: int, nvfp4: bool, zeros: bool
) -> AotCase:
    tile, (k, n) = (
        _tile_of(rows, gated, 8 if lead else 512),
        (shapes.hidden, shapes.inner) if gated or up else (shapes.inner, shapes.hidden),
    )
    signature = {
        "x": f"*{dtype}", "w_desc": f"tensordesc<u8{_box(tile)},{W_LAYOUT!r}>",
        "scales": "*i32" if nvfp4 else "*fp32", "zeros": "*fp32" if nvfp4 else "*i8", "out": f"*{dtype}",
        **ints("ids order tiles", "M count"),
    }  # fmt: skip
    options = {"INPUTS": NVFP4_GROUP if nvfp4 else 128, "NVFP4": nvfp4, "HAS_ZEROS": zeros, "OVERLAP": True}
    sizes = _sizes(shapes, k, n, gated, up, lead, tile)
    return AotCase(packed_experts_kernel, signature, sizes | options, num_warps=4, maxnreg=tile.registers)


_OF_35B = Shapes(64, 2048, 512, 256, 8, True)

AOT = [
    *(
        _case("bf16", _OF_35B, gated, False, rows == 16 and lead, rows, nvfp4, zeros)
        for rows in TILES
        for gated in (True, False)
        for lead in (True, False)[: 2 if rows == 16 else 1]
        for nvfp4, zeros in ((True, False), (False, True))
    ),
    _case("fp16", Shapes(64, 2688, 1856, 128, 6), False, True, False, 16, True, False),
    _case("fp16", Shapes(64, 2688, 1856, 128, 6), False, False, False, 32, True, False),
]
