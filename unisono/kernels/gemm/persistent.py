"""Building blocks of persistent kernels for several products of few rows (Gluon, Hopper).

``kernels/gemm/layer_tail.py`` uses them. There is one program per multiprocessor. One of its warps loads tiles of
weights, group after group, into stages in shared memory; nothing writes weights, so the next product's first groups are
loaded before its rows exist. The other warps multiply. Programs wait for each other at counters in memory (a grid
barrier) before they read each other's stores.

Shapes: M rows, few enough for 32-bit indices, K inputs, N outputs of a product, H features of a norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from unisono.config import env
from unisono.kernels.hopper import WIDTH, block_barrier, next_group, next_stage, order_loads, stage_barriers

LINE = 16
"""Counters (int64) in a cache line of 128 bytes: each has a line of its own."""

HALF = gl.constexpr(32)
"""First row of a tile's second half."""


@cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a Hopper GPU; 0 for other devices."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def counters(device: torch.device) -> torch.Tensor:
    """Counters of arrivals of all launches at either grid barrier. Launches must not run at once."""
    return torch.zeros(2 * LINE, dtype=torch.int64, device=device)


_holders: dict[torch.device, weakref.ref[object]] = {}
"""Owner of persistent launches, by device."""

_claimant: object | None = None


@contextmanager
def claimed_by(owner: object) -> Iterator[None]:
    """Claim devices for ``owner`` in this context. All launches of an owner must be on one stream."""
    global _claimant
    before, _claimant = _claimant, owner
    try:
        yield
    finally:
        _claimant = before


def claim_device(device: torch.device) -> bool:
    """Claim the device for persistent launches. True if no other owner holds it, or if there is no claimant.

    ``UNISONO_STAYING_LAUNCHES=0`` disables them, as for processes that share a GPU's multiprocessors.
    """
    if not env.persistent_launches():
        return False
    if device.type == "cpu" or _claimant is None:
        return True
    held = _holders.get(device)
    if held is None or held() is None:
        _holders[device] = held = weakref.ref(_claimant)
    return held() is _claimant


def release(owner: object) -> None:
    """Release the devices of ``owner``."""
    for device in [device for device, held in _holders.items() if held() in (owner, None)]:
        del _holders[device]


def tile_of(outputs: int, programs: int, most: int) -> int:
    """Choose the outputs per tile that divide a product most evenly among programs; among equals, with the fewest
    loads.
    """

    def cost(tile: int) -> tuple[int, int, int]:
        tiles = (outputs + tile - 1) // tile
        return (tiles + programs - 1) // programs * tile, -box_of(tile), -tile

    return min(range(16, most + 1, 16), key=cost)


def box_of(tile: int) -> int:
    """Rows of a tile loaded at once: a power of two."""
    return tile & -tile


@gluon.jit
def _load_weight(desc, w, full, stage, tile, group, second, ROWS: gl.constexpr, EACH: gl.constexpr,
                 STEP: gl.constexpr, OUTPUTS: gl.constexpr, PAIR: gl.constexpr):  # fmt: skip
    """Start to load a group of a weight's tile into a stage. PAIR: also the rows ``second`` further on."""
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
    """Wait until the stage's contents of the previous phase have been multiplied."""
    mbarrier.wait(free.index(stage), phase ^ 1)


@gluon.jit
def load_product(w_desc, x_desc, w, x, full, free, ready, turn: gl.constexpr, item, N, K, second, ROWS: gl.constexpr,
                  STAGES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr, OUTPUTS: gl.constexpr,
                  PAIR: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load the operands of one product of the layer, its first weights before its rows exist; returns the next item.

    turn: number of the product: its rows exist when that many barriers of ``ready`` are completed; 0: when the kernels
    ahead have ended. Each product has its own barrier, since a program without a tile of it may be several ahead.
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
               Q, H, I, F, ROWS: gl.constexpr, STAGES: gl.constexpr,  # noqa: E741
               EACH: gl.constexpr, STEP: gl.constexpr, TILE_H: gl.constexpr, TILE_I: gl.constexpr,
               TILE_F: gl.constexpr, FOLLOWED: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load all operands of a layer tail, in the order in which they are multiplied. The part of one warp."""
    item = load_product(o_desc, x_desc, w, x, full, free, ready, 0, gl.to_tensor(0), H, Q, 0,
                        ROWS, STAGES, EACH, STEP, TILE_H, False, OVERLAP)  # fmt: skip
    item = load_product(gate_up_desc, n1_desc, w, x, full, free, ready, 1, item, I, H, I,
                        ROWS, STAGES, EACH, STEP, TILE_I, True, OVERLAP)  # fmt: skip
    item = load_product(down_desc, act_desc, w, x, full, free, ready, 2, item, H, I, 0,
                        ROWS, STAGES, EACH, STEP, TILE_H, False, OVERLAP)  # fmt: skip
    if FOLLOWED:
        load_product(next_desc, n2_desc, w, x, full, free, ready, 3, item, F, H, 0,
                     ROWS, STAGES, EACH, STEP, TILE_F, False, OVERLAP)  # fmt: skip


@gluon.jit
def stages(DTYPE: gl.constexpr, SHARED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
           STEP: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """Allocate (weights, rows, and the barriers full, free, ready) of a program in shared memory."""
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
    """Store products y [WIDE or 32, ROWS] with OUTPUTS valid outputs, as ``store_sums`` of ``kernels/gemm/linear.py``
    does.
    """
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
    """Compute ``silu(gate) * up`` of products [WIDE, ROWS] whose first half is gates: [WIDE / 2, ROWS], not rounded."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    both = acc.to(DTYPE).reshape([2, WIDE // 2, ROWS]).permute([1, 2, 0])
    gate, up = gl.split(gl.convert_layout(both, PAIRS))
    gate, up = gate.to(gl.float32), up.to(gl.float32)
    silu = (gate / (1.0 + gl.exp(-gate))).to(DTYPE).to(gl.float32)
    return silu * up


@gluon.jit
def _norm_row(x, weight, row, eps, H, BLOCK_H: gl.constexpr):
    """Norm one row as ``kernels/norm/rms_norm.py`` does, in x's dtype, summed in the same order."""
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
def arrive(counter):
    """Signal that this program's stores are done. Returns the counter's value when all programs have arrived."""
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
def norm(x, weight, out, counters, eps, M, H, LINE: gl.constexpr, BLOCK_H: gl.constexpr):
    """Normalise rows whose parts all programs have stored, each in another program; returns the second target.

    The last programs do it: they have the fewest tiles.
    """
    stored = arrive(counters)
    row = gl.num_programs(0) - 1 - gl.program_id(0)
    if row < M:
        wait(counters, stored)
        _store_row(_norm_row(x, weight, row, eps, H, BLOCK_H), out, row, H, BLOCK_H)
    return arrive(counters + LINE)
