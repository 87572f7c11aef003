"""What a kernel that stays for several products of few rows is made of (Gluon, Hopper); see
``kernels/gemm/layer_tail.py``.

There is one program for each multiprocessor. One of its warps loads tiles of weights, group after group, into stages in
shared memory; nothing writes weights, so the next product's first groups are loaded before its rows exist. The other
warps multiply. Programs meet at counters in memory before they read what others have stored.

Shapes: M rows, few enough for indices of 32 bits, K inputs, N outputs of a product, H features of a norm.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from unisono.kernels.gemm.fp8_quantize import scaled_by, scales_of
from unisono.kernels.hopper import WIDTH, block_barrier, next_group, next_stage, order_loads, stage_barriers

LINE = 16
"""Counters (int64) in a cache line of 128 bytes: each has a line of its own."""

HALF = gl.constexpr(32)
"""The row of a tile at which its second half begins."""


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a Hopper GPU; 0 for other devices."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def counters(device: torch.device) -> torch.Tensor:
    """How often programs of all launches have arrived at either meeting point. Launches must not run at once."""
    return torch.zeros(2 * LINE, dtype=torch.int64, device=device)


_holders: dict[torch.device, weakref.ref[object]] = {}
"""By device, whose launches may stay."""

_claimant: object | None = None


@contextmanager
def claimed_by(owner: object) -> Iterator[None]:
    """In this context devices are claimed for ``owner``, all of whose launches are on one stream."""
    global _claimant
    before, _claimant = _claimant, owner
    try:
        yield
    finally:
        _claimant = before


def may_stay(device: torch.device, faster: bool = True) -> bool:
    """Claim the device; whether that succeeds: nobody else has it, or there is no claimant.

    faster: whether the launch is known to be faster on a GPU than those it replaces.
    UNISONO_STAYING_LAUNCHES: "1": slower ones, too; "0": none, as for processes that share a GPU's multiprocessors.
    """
    asked = os.environ.get("UNISONO_STAYING_LAUNCHES", "")
    if asked == "0" or (asked != "1" and device.type != "cpu" and not faster):
        return False
    if device.type == "cpu" or _claimant is None:
        return True
    held = _holders.get(device)
    if held is None or held() is None:
        _holders[device] = held = weakref.ref(_claimant)
    return held() is _claimant


def release(owner: object) -> None:
    """Let others claim what ``owner`` has."""
    for device in [device for device, held in _holders.items() if held() in (owner, None)]:
        del _holders[device]


def tile_of(outputs: int, programs: int, most: int) -> int:
    """Outputs of a tile that divide a product most evenly among programs; of the best, what needs few loads."""

    def cost(tile: int) -> tuple[int, int, int]:
        tiles = (outputs + tile - 1) // tile
        return (tiles + programs - 1) // programs * tile, -box_of(tile), -tile

    return min(range(16, most + 1, 16), key=cost)


def box_of(tile: int) -> int:
    """Rows of a tile that are loaded at once: a power of two."""
    return tile & -tile


@gluon.jit
def _load_weight(desc, w, full, stage, tile, group, second, ROWS: gl.constexpr, EACH: gl.constexpr,
                 STEP: gl.constexpr, OUTPUTS: gl.constexpr, PAIR: gl.constexpr):  # fmt: skip
    """Start to load a group of a weight's tile into a stage. PAIR: with that of rows ``second`` further on."""
    BOX: gl.constexpr = desc.block_shape[0]
    COPIES: gl.constexpr = 2 if PAIR else 1
    mbarrier.expect(full.index(stage), EACH * (COPIES * OUTPUTS + ROWS) * WIDTH)
    for j in gl.static_range(EACH):
        column = (group * EACH + j) * STEP
        for copy in gl.static_range(COPIES):
            for box in gl.static_range(OUTPUTS // BOX):
                row = copy * second + tile * OUTPUTS + box * BOX
                place = w.index(stage * EACH + j).slice(copy * HALF + box * BOX, BOX)
                tma.async_copy_global_to_shared(desc, [row, column], full.index(stage), place)


@gluon.jit
def _load_rows(desc, x, full, stage, group, EACH: gl.constexpr, STEP: gl.constexpr):
    """Start to load the same group of all rows."""
    for j in gl.static_range(EACH):
        column = (group * EACH + j) * STEP
        tma.async_copy_global_to_shared(desc, [0, column], full.index(stage), x.index(stage * EACH + j))


@gluon.jit
def _wait_free(free, stage, phase):
    """Wait until what a stage held in the phase before this one has been multiplied."""
    mbarrier.wait(free.index(stage), phase ^ 1)


@gluon.jit
def load_product(w_desc, x_desc, w, x, full, free, ready, turn: gl.constexpr, item, N, K, second, ROWS: gl.constexpr,
                  STAGES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr, OUTPUTS: gl.constexpr,
                  PAIR: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load what one product of the layer reads, its first weights before its rows exist; returns the next item.

    turn: rows exist when that many barriers of ``ready`` are completed; 0: when the launch's turn has come. Each turn
    has a barrier of its own, for a program without a tile of the product may be several ahead.
    """
    programs = gl.num_programs(0)
    tiles, groups = (N + OUTPUTS - 1) // OUTPUTS, (K + STEP * EACH - 1) // (STEP * EACH)
    items = (tiles - gl.program_id(0) + programs - 1) // programs * groups
    early = gl.minimum(items, STAGES)
    tile, group = gl.program_id(0), gl.to_tensor(0)
    stage, phase = item % STAGES, item // STAGES & 1
    of_rows, row_stage = group, stage
    for _ in range(early):
        _wait_free(free, stage, phase)
        _load_weight(w_desc, w, full, stage, tile, group, second, ROWS, EACH, STEP, OUTPUTS, PAIR)
        tile, group = next_group(tile, group, groups)
        stage, phase = next_stage(stage, phase, STAGES)
    if turn > 0:
        mbarrier.wait(ready.index(turn - 1), 0)
    elif OVERLAP:
        gdc_wait()
    order_loads()
    for _ in range(early):
        _load_rows(x_desc, x, full, row_stage, of_rows, EACH, STEP)
        _, of_rows = next_group(tile, of_rows, groups)
        row_stage, _ = next_stage(row_stage, phase, STAGES)
    for _ in range(early, items):
        _wait_free(free, stage, phase)
        _load_weight(w_desc, w, full, stage, tile, group, second, ROWS, EACH, STEP, OUTPUTS, PAIR)
        _load_rows(x_desc, x, full, stage, group, EACH, STEP)
        tile, group = next_group(tile, group, groups)
        stage, phase = next_stage(stage, phase, STAGES)
    return item + items


@gluon.jit
def load_layer(x_desc, n1_desc, act_desc, n2_desc, o_desc, gate_up_desc, down_desc, next_desc, w, x, full, free, ready,
               Q, H, I, F, TURN: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,  # noqa: E741
               EACH: gl.constexpr, STEP: gl.constexpr, TILE_H: gl.constexpr, TILE_I: gl.constexpr,
               TILE_F: gl.constexpr, FOLLOWED: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """One warp's part of a layer's tail: load everything, in the order in which it is multiplied. TURN: the first."""
    item = load_product(o_desc, x_desc, w, x, full, free, ready, TURN, gl.to_tensor(0), H, Q, 0,
                        ROWS, STAGES, EACH, STEP, TILE_H, False, OVERLAP)  # fmt: skip
    item = load_product(gate_up_desc, n1_desc, w, x, full, free, ready, TURN + 1, item, I, H, I,
                        ROWS, STAGES, EACH, STEP, TILE_I, True, OVERLAP)  # fmt: skip
    item = load_product(down_desc, act_desc, w, x, full, free, ready, TURN + 2, item, H, I, 0,
                        ROWS, STAGES, EACH, STEP, TILE_H, False, OVERLAP)  # fmt: skip
    if FOLLOWED:
        load_product(next_desc, n2_desc, w, x, full, free, ready, TURN + 3, item, F, H, 0,
                     ROWS, STAGES, EACH, STEP, TILE_F, False, OVERLAP)  # fmt: skip


@gluon.jit
def stages(DTYPE: gl.constexpr, SHARED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
           STEP: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """(weights, rows, and the barriers full, free, ready) of a program, in shared memory."""
    w = gl.allocate_shared_memory(DTYPE, [STAGES * EACH, WIDE, STEP], SHARED)
    x = gl.allocate_shared_memory(DTYPE, [STAGES * EACH, ROWS, STEP], SHARED)
    full, free = stage_barriers(STAGES, 1, 1)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    block_barrier()
    return w, x, full, free, ready


@gluon.jit
def store_tile(y, out, bias, residual, first, M, N, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
           OUTPUTS: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """``kernels/gemm/linear.py``'s ``store_sums`` of products y [WIDE or 32, ROWS], of which OUTPUTS count."""
    SIDE: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, gl.num_warps()], [0, 1])
    y = gl.convert_layout(y.to(out.dtype.element_ty), SIDE)
    at_col = gl.arange(0, y.shape[0], gl.SliceLayout(1, SIDE))
    col, row = first + at_col, gl.arange(0, ROWS, gl.SliceLayout(0, SIDE))
    col_ok = (at_col < OUTPUTS) & (col < N)
    if HAS_BIAS:
        b = gl.load(bias + col, mask=col_ok, other=0.0)
        y = (y.to(gl.float32) + b.to(gl.float32)[:, None]).to(y.dtype)
    at = row.to(gl.int64)[None, :] * N + col[:, None]
    inside = (row < M)[None, :] & col_ok[:, None]
    if HAS_RESIDUAL:
        r = gl.load(residual + at, mask=inside, other=0.0, cache_modifier=".cg")
        y = (y.to(gl.float32) + r.to(gl.float32)).to(y.dtype)
    gl.store(out + at, y, mask=inside)


@gluon.jit
def gated(acc, DTYPE: gl.constexpr, WIDE: gl.constexpr, ROWS: gl.constexpr):
    """``silu(gate) * up`` of products [WIDE, ROWS] whose first half is gates: [WIDE / 2, ROWS], to be rounded."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    both = acc.to(DTYPE).reshape([2, WIDE // 2, ROWS]).permute([1, 2, 0])
    gate, up = gl.split(gl.convert_layout(both, PAIRS))
    gate, up = gate.to(gl.float32), up.to(gl.float32)
    silu = (gate / (1.0 + gl.exp(-gate))).to(DTYPE).to(gl.float32)
    return silu * up


@gluon.jit
def _norm_row(x, weight, row, eps, H, BLOCK_H: gl.constexpr):
    """One row of ``kernels/norm/rms_norm.py`` in x's dtype, summed in the same order."""
    ROW: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    cols = gl.arange(0, BLOCK_H, ROW)
    inside = cols < H
    w = gl.load(weight + cols, mask=inside, other=0.0).to(gl.float32)
    value = gl.load(x + row * H + cols, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    squares = gl.fma(value, value, gl.zeros_like(value))  # as norm.square
    scale = gl.rsqrt(gl.sum(squares, axis=0) / H + eps)
    normed = value * scale
    if weight.dtype.element_ty != gl.float32:
        normed = normed.to(x.dtype.element_ty).to(gl.float32)
    return (normed * w).to(x.dtype.element_ty)


@gluon.jit
def _store_row(value, out, row, H, BLOCK_H: gl.constexpr):
    cols = gl.arange(0, BLOCK_H, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    gl.store(out + row * H + cols, value, mask=cols < H)


@gluon.jit
def store_quantised(value, x8, scales, row, first, K, PADDED, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """``kernels/gemm/fp8_quantize.py``'s function of that name, for COLUMNS columns of a row from ``first`` on."""
    GROUPED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    grouped = gl.convert_layout(value.to(gl.float32).reshape([COLUMNS // GROUP, GROUP]), GROUPED)
    groups = first // GROUP + gl.arange(0, COLUMNS // GROUP, gl.SliceLayout(1, GROUPED))
    cols = groups[:, None] * GROUP + gl.arange(0, GROUP, gl.SliceLayout(0, GROUPED))[None, :]
    scale = scales_of(grouped)
    gl.store(x8 + row * K + cols, scaled_by(grouped, scale).to(x8.dtype.element_ty), mask=cols < K)
    gl.store(scales + groups * PADDED + row, scale, mask=groups * GROUP < K)


@gluon.jit
def arrive(counter):
    """Tell all programs that this one's stores are done; returns what the counter is when all have said so."""
    order_loads()
    block_barrier()
    programs = gl.num_programs(0).to(gl.int64)
    return gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") // programs * programs + programs


@gluon.jit
def wait(counter, target):
    """Wait until all programs have arrived, and see their stores."""
    count = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while count < target:
        count = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    block_barrier()
    order_loads()


@gluon.jit
def norm(x, weight, out, x8, scales, counters, eps, M, H, PADDED, LINE: gl.constexpr, BLOCK_H: gl.constexpr,
         KEEP: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """The norm of rows whose parts all programs have stored, each by another program; returns the second target.

    They are the last programs, which have the fewest tiles. KEEP: it is stored in ``out``. GROUP: columns that share a
    scale in x8; 0: it is not quantised.
    """
    stored = arrive(counters)
    row = gl.num_programs(0) - 1 - gl.program_id(0)
    if row < M:
        wait(counters, stored)
        value = _norm_row(x, weight, row, eps, H, BLOCK_H)
        if KEEP:
            _store_row(value, out, row, H, BLOCK_H)
        if GROUP > 0:
            store_quantised(value, x8, scales, row, 0, H, PADDED, BLOCK_H, GROUP)
    return arrive(counters + LINE)


@gluon.jit
def quantise(x, x8, scales, M, K, PADDED, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """This program's part of rows x [M, K] in e4m3."""
    ROW: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    parts = (K + COLUMNS - 1) // COLUMNS
    for item in range(gl.num_programs(0) - 1 - gl.program_id(0), M * parts, gl.num_programs(0)):
        row, first = item // parts, item % parts * COLUMNS
        cols = first + gl.arange(0, COLUMNS, ROW)
        value = gl.load(x + row * K + cols, mask=cols < K, other=0.0, cache_modifier=".cg")
        store_quantised(value, x8, scales, row, first, K, PADDED, COLUMNS, GROUP)


@gluon.jit
def quantise_stored(x, x8, scales, counters, M, K, PADDED, LINE: gl.constexpr, COLUMNS: gl.constexpr,
                    GROUP: gl.constexpr):  # fmt: skip
    """Rows whose parts all programs have stored, in e4m3; returns the second target."""
    stored = arrive(counters)
    if gl.num_programs(0) - 1 - gl.program_id(0) < M * ((K + COLUMNS - 1) // COLUMNS):
        wait(counters, stored)
        quantise(x, x8, scales, M, K, PADDED, COLUMNS, GROUP)
    return arrive(counters + LINE)
