"""Kernel of ``kernels/gemm/divided_tail.py``: the layer tail of one rank of a divided layer (Gluon, Hopper).

The same products as in ``layer_tail_gluon.py``; each rank computes its part of every product's outputs. Rows that all
ranks need are stored to the *regions* of all of them, which each GPU maps, and programs of all ranks wait for each
other at counters in the regions. Nothing else travels: there is no gather of its own.

Shapes: M rows, H features, I intermediate features, Q inputs of the output projection, F outputs of the next input
projection on this rank, N ranks. A rank's part of H, I or Q is an N-th.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from unisono.kernels.gemm.layer_tail_gluon import multiply, sum_tile
from unisono.kernels.gemm.persistent import arrive, gated, load_product, norm_row, stages, store_row, wait
from unisono.kernels.hopper import block_barrier, order_loads
from unisono.kernels.overlap import overlapping

INPUTS, TOTAL, GATED, SUM = (gl.constexpr(n) for n in range(4))
"""Counters of a region: ranks that have stored the inputs, the sum after o, the gated product, the sum after down."""

COUNTERS = gl.constexpr(4)
"""Number of such counters. As many follow, for the arrivals of this rank's programs."""

CAPACITY = 2 << 20
"""Bytes of each array of a region."""

AT_INPUTS, AT_TOTAL, AT_GATED, AT_SUM = (gl.constexpr(1024 + n * CAPACITY) for n in range(4))
"""Bytes of a region before its arrays: [M, Q], [M, H], [M, I] and [M, H]. Counters are at its beginning."""

REGION_BYTES = 1024 + 4 * CAPACITY

LOOKS = 4096
"""Looks at a counter between two reads of the give-up word, which is in the host's memory."""


@gluon.jit
def _array(addresses, peer, at, like):
    """Pointer to the array at byte ``at`` of a rank's region. like: a pointer of its dtype."""
    return gl.multiple_of((gl.load(addresses + peer) + at).to(like.dtype), 16)


@gluon.jit
def _counter(addresses, peer, number, LINE: gl.constexpr):
    return (gl.load(addresses + peer) + number * LINE * 8).to(gl.pointer_type(gl.int64))


@gluon.jit
def arrive_at_ranks(addresses, number, LINE: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr):
    """Signal all ranks that this program's stores are done. Returns the counter's value when all programs of all ranks
    have arrived.

    The last program of this rank to arrive signals for all of them: what the others stored is visible to it, and so to
    who sees the signal. A counter is used again only after all programs have waited at another one, so its values of
    two uses do not mix.
    """
    order_loads()
    block_barrier()
    programs = gl.num_programs(0).to(gl.int64)
    arrived = gl.atomic_add(_counter(addresses, RANK, COUNTERS + number, LINE), 1, sem="acq_rel", scope="gpu")
    if arrived % programs == programs - 1:
        for peer in gl.static_range(RANKS):
            gl.atomic_add(_counter(addresses, peer, number, LINE), 1, sem="release", scope="sys")
    return (arrived // programs + 1) * RANKS


@gluon.jit
def wait_for_ranks(addresses, number, target, LINE: gl.constexpr, LOOKS: gl.constexpr, RANK: gl.constexpr,
                   RANKS: gl.constexpr):  # fmt: skip
    """Wait until all programs of all ranks have arrived, and see their stores. Undefined if the ranks have given up."""
    counter = _counter(addresses, RANK, number, LINE)
    given_up = gl.load(addresses + RANKS).to(gl.pointer_type(gl.int32))
    count = gl.load(counter, volatile=True)
    looks = 0
    while count < target:
        count = gl.load(counter, volatile=True)
        looks += 1
        if looks % LOOKS == 0:  # noqa: SIM102 - `and` would read the host's memory at every look
            if gl.load(given_up, volatile=True) != 0:
                count = target
    _see_ranks()
    block_barrier()
    order_loads()


@gluon.jit
def _see_ranks():
    """Order what follows after the loads ahead of it, for stores of other GPUs."""
    gl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _send_rows(x, addresses, at, M, N, BLOCK: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr):
    """Store this rank's columns x [M, N] in every region."""
    cols = gl.arange(0, BLOCK, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    for row in range(gl.program_id(0), M, gl.num_programs(0)):
        value = gl.load(x + row * N + cols, mask=cols < N, other=0.0)
        for peer in gl.static_range(RANKS):
            to = _array(addresses, peer, at, x) + row * (RANKS * N) + RANK * N
            gl.store(to + cols, value, mask=cols < N)


@gluon.jit
def _send_tile(y, addresses, at, residual, first, M, N, HAS_RESIDUAL: gl.constexpr, OUTPUTS: gl.constexpr,
               ROWS: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr):  # fmt: skip
    """Store a tile of this rank's outputs in every region, as ``persistent.store_tile`` does for one GPU.

    residual [M, N · RANKS]: also gives the dtype.
    """
    SIDE: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, gl.num_warps()], [0, 1])
    y = gl.convert_layout(y.to(residual.dtype.element_ty), SIDE)
    at_col = gl.arange(0, y.shape[0], gl.SliceLayout(1, SIDE))
    col, row = first + at_col, gl.arange(0, ROWS, gl.SliceLayout(0, SIDE))
    place = row[None, :] * (RANKS * N) + RANK * N + col[:, None]
    inside = (row < M)[None, :] & ((at_col < OUTPUTS) & (col < N))[:, None]
    if HAS_RESIDUAL:
        r = gl.load(residual + place, mask=inside, other=0.0, cache_modifier=".cg")
        y = (y.to(gl.float32) + r.to(gl.float32)).to(y.dtype)
    for peer in gl.static_range(RANKS):
        gl.store(_array(addresses, peer, at, residual) + place, y, mask=inside)


@gluon.jit
def _multiply_and_send(w, x, full, free, item, addresses, at, residual, M, N, K, GATED_: gl.constexpr,
                       HAS_RESIDUAL: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
                       STEP: gl.constexpr, WIDE: gl.constexpr, OUTPUTS: gl.constexpr, RANK: gl.constexpr,
                       RANKS: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Compute this rank's N outputs of a product and store them in every region; returns the next item."""
    groups = (K + STEP * EACH - 1) // (STEP * EACH)
    for tile in range(gl.program_id(0), (N + OUTPUTS - 1) // OUTPUTS, gl.num_programs(0)):
        y = sum_tile(w, x, full, free, item, groups, STAGES, EACH, ROWS, WIDE, MMA)
        item += groups
        if GATED_:
            y = gated(y, residual.dtype.element_ty, WIDE, ROWS)
        _send_tile(y, addresses, at, residual, tile * OUTPUTS, M, N, HAS_RESIDUAL, OUTPUTS, ROWS, RANK, RANKS)
    return item


@gluon.jit
def _norm_rows(whole, weight, kept, out, addresses, number, counter, eps, M, H, KEEP: gl.constexpr, LINE: gl.constexpr,
               LOOKS: gl.constexpr, BLOCK_H: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr):  # fmt: skip
    """Normalise rows whose parts all ranks have stored, each in another program; returns the target of ``counter``.

    KEEP: copy the rows to ``kept``; the region is written again in the next layer. The last programs do it: they have
    the fewest tiles.
    """
    stored = arrive_at_ranks(addresses, number, LINE, RANK, RANKS)
    row = gl.num_programs(0) - 1 - gl.program_id(0)
    if row < M:
        wait_for_ranks(addresses, number, stored, LINE, LOOKS, RANK, RANKS)
        store_row(norm_row(whole, weight, row, eps, H, BLOCK_H), out, row, H, BLOCK_H)
        if KEEP:
            cols = gl.arange(0, BLOCK_H, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
            value = gl.load(whole + row * H + cols, mask=cols < H, other=0.0, cache_modifier=".cg")
            store_row(value, kept, row, H, BLOCK_H)
    return arrive(counter)


@gluon.jit
def _compute(w, x, full, free, ready, inputs, residual, o_norm, next_norm, next_bias, n1, out, n2, product, counters,
             addresses, eps, next_eps, M, Q, H, I, F,  # noqa: E741
             HAS_BIAS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr,
             WIDE: gl.constexpr, LINE: gl.constexpr, LOOKS: gl.constexpr, BLOCK_H: gl.constexpr,
             BLOCK_Q: gl.constexpr, TILE_H: gl.constexpr, TILE_I: gl.constexpr, TILE_F: gl.constexpr,
             FOLLOWED: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Send inputs, compute products, sums, norms and SiLU. The part of all warps but the loading one."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    _send_rows(inputs, addresses, AT_INPUTS, M, Q // RANKS, BLOCK_Q, RANK, RANKS)
    target = arrive_at_ranks(addresses, INPUTS, LINE, RANK, RANKS)
    wait_for_ranks(addresses, INPUTS, target, LINE, LOOKS, RANK, RANKS)
    mbarrier.arrive(ready.index(0))
    item = _multiply_and_send(w, x, full, free, gl.to_tensor(0), addresses, AT_TOTAL, residual, M, H // RANKS, Q,
                              False, True, ROWS, STAGES, EACH, STEP, WIDE, TILE_H, RANK, RANKS, MMA)  # fmt: skip
    total = _array(addresses, RANK, AT_TOTAL, residual)
    normed = _norm_rows(total, o_norm, n1, n1, addresses, TOTAL, counters, eps, M, H, False, LINE, LOOKS, BLOCK_H,
                        RANK, RANKS)  # fmt: skip
    wait(counters, normed)
    mbarrier.arrive(ready.index(1))
    item = _multiply_and_send(w, x, full, free, item, addresses, AT_GATED, residual, M, I // RANKS, H,
                              True, False, ROWS, STAGES, EACH, STEP, WIDE, TILE_I, RANK, RANKS, MMA)  # fmt: skip
    target = arrive_at_ranks(addresses, GATED, LINE, RANK, RANKS)
    wait_for_ranks(addresses, GATED, target, LINE, LOOKS, RANK, RANKS)
    mbarrier.arrive(ready.index(2))
    item = _multiply_and_send(w, x, full, free, item, addresses, AT_SUM, total, M, H // RANKS, I,
                              False, True, ROWS, STAGES, EACH, STEP, WIDE, TILE_H, RANK, RANKS, MMA)  # fmt: skip
    normed = _norm_rows(_array(addresses, RANK, AT_SUM, residual), next_norm, out, n2, addresses, SUM, counters + LINE,
                        next_eps, M, H, True, LINE, LOOKS, BLOCK_H, RANK, RANKS)  # fmt: skip
    if FOLLOWED:
        wait(counters + LINE, normed)
        mbarrier.arrive(ready.index(3))
        multiply(w, x, full, free, item, product, next_bias, product, M, F, H, False, HAS_BIAS, False,
                  ROWS, STAGES, EACH, STEP, WIDE, TILE_F, MMA)  # fmt: skip


@gluon.jit
def _load(x_desc, n1_desc, act_desc, n2_desc, o_desc, gate_up_desc, down_desc, next_desc, w, x, full, free, ready,
          Q, H, I, F, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,  # noqa: E741
          STEP: gl.constexpr, TILE_H: gl.constexpr, TILE_I: gl.constexpr, TILE_F: gl.constexpr,
          FOLLOWED: gl.constexpr, RANKS: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Load all operands, in the order in which they are multiplied. The part of one warp."""
    item = load_product(o_desc, x_desc, w, x, full, free, ready, 1, gl.to_tensor(0), H // RANKS, Q, 0,
                        ROWS, STAGES, EACH, STEP, TILE_H, False, OVERLAP)  # fmt: skip
    item = load_product(gate_up_desc, n1_desc, w, x, full, free, ready, 2, item, I // RANKS, H, I // RANKS,
                        ROWS, STAGES, EACH, STEP, TILE_I, True, OVERLAP)  # fmt: skip
    item = load_product(down_desc, act_desc, w, x, full, free, ready, 3, item, H // RANKS, I, 0,
                        ROWS, STAGES, EACH, STEP, TILE_H, False, OVERLAP)  # fmt: skip
    if FOLLOWED:
        load_product(next_desc, n2_desc, w, x, full, free, ready, 4, item, F, H, 0,
                     ROWS, STAGES, EACH, STEP, TILE_F, False, OVERLAP)  # fmt: skip


@overlapping(reads_early=True)
@gluon.jit
def divided_tail_kernel(
    x_desc, n1_desc, act_desc, n2_desc, o_desc, gate_up_desc, down_desc, next_desc,
    inputs, residual, o_norm, next_norm, next_bias, n1, out, n2, product, counters, addresses,
    eps, next_eps, M, Q, H, I, F,  # noqa: E741
    HAS_BIAS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, STEP: gl.constexpr,
    WIDE: gl.constexpr, LINE: gl.constexpr, LOOKS: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_Q: gl.constexpr,
    TILE_H: gl.constexpr, TILE_I: gl.constexpr, TILE_F: gl.constexpr, FOLLOWED: gl.constexpr, RANK: gl.constexpr,
    RANKS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Run a rank's layer tail with one program per multiprocessor, as ``layer_tail_kernel`` does on one GPU.

    inputs [M, Q / N] and product [M, F] are this rank's; residual, out and n2 [M, H] are whole. x_desc, act_desc: rows
    of this rank's region. addresses [N + 1] int64: every rank's region, and the give-up word. All
    programs of all ranks must run at once.
    """
    DTYPE: gl.constexpr = o_desc.dtype
    SHARED: gl.constexpr = o_desc.layout
    w, x, full, free, ready = stages(DTYPE, SHARED, ROWS, STAGES, EACH, STEP, WIDE)
    gl.warp_specialize(
        [
            (_compute, (
                w, x, full, free, ready, inputs, residual, o_norm, next_norm, next_bias, n1, out, n2, product,
                counters, addresses, eps, next_eps, M, Q, H, I, F, HAS_BIAS, ROWS,
                STAGES, EACH, STEP, WIDE, LINE, LOOKS, BLOCK_H, BLOCK_Q, TILE_H, TILE_I, TILE_F, FOLLOWED, RANK, RANKS,
                OVERLAP)),
            (_load, (
                x_desc, n1_desc, act_desc, n2_desc, o_desc, gate_up_desc, down_desc, next_desc, w, x, full, free,
                ready, Q, H, I, F, ROWS, STAGES, EACH, STEP, TILE_H, TILE_I, TILE_F, FOLLOWED, RANKS, OVERLAP)),
        ],
        [1],
        [40],
    )  # fmt: skip
