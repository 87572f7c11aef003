"""Paged attention whose bits depend on a token's own query and keys alone.

Two ops share one walk over the KV cache. ``attention_round`` serves rows of equal width W (decoding and
verification) and spreads a row's KV splits over the chip; ``attention_extend`` serves ragged prompt chunks
and spreads query tiles. Either way KV is walked in splits of SPLIT keys at absolute positions, each split
with fresh accumulators, and splits merge in order by one formula (``attention_triton._merge``): it does not
matter which program walked which. Row sums are taken by the tensor core (a dot with ones), whose order, unlike
a reduction's, is the same in every layout. Each multiply-add a compiler might contract is an explicit fma.

What the host must know of a pass is its shapes. Lengths are read on the device, through a plan made once
per pass (``attention_plan``, ``attention_extend_plan``) and used by all layers.

Called by the attention backends. Shapes: T tokens, R rows, W width, S slots, NP pages, MP pages per
request, P page size, Hq / Hkv query / KV heads, G = Hq / Hkv, D head dim. Index tensors are int32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from unisono.kernels.attention_cpu import (
    SPLIT,
    attention_extend_cpu,
    attention_extend_plan_cpu,
    attention_plan_cpu,
    attention_round_cpu,
)
from unisono.kernels.attention_triton import extend_kernel, extend_plan_kernel, plan_kernel, round_kernel
from unisono.kernels.library import AotCase, define, register

KEYS = 64
"""Keys per step of a walk. Like SPLIT it is part of the reduction order: one value for every kernel."""

LOG2_E = 1.4426950408889634


def _int32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


def _plan_shapes(
    slots: torch.Tensor, kv_len: torch.Tensor, width: int, num_kv_heads: int, partials: int, programs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = slots.shape[0]
    return _int32(slots, partials + rows, 6), _int32(slots, 1), _int32(slots, rows, width, num_kv_heads)


def launch_attention_plan(
    slots: torch.Tensor, kv_len: torch.Tensor, width: int, num_kv_heads: int, partials: int, programs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`attention_plan`."""
    rows = slots.shape[0]
    work, count, arrivals = _plan_shapes(slots, kv_len, width, num_kv_heads, partials, programs)
    plan_kernel[(rows,)](
        slots, kv_len, work, count, arrivals, rows, partials, programs, width * num_kv_heads, num_kv_heads,
        SPLIT, triton.next_power_of_2(rows),
    )  # fmt: skip
    return work, count, arrivals


def _extend_plan_shapes(
    slots: torch.Tensor, query_start: torch.Tensor, num_tokens: int, tile_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    bound = triton.cdiv(num_tokens, tile_tokens) + slots.shape[0] + 1
    return _int32(slots, bound, 3), _int32(slots, 1)


def launch_attention_extend_plan(
    slots: torch.Tensor, query_start: torch.Tensor, num_tokens: int, tile_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`attention_extend_plan`."""
    rows = slots.shape[0]
    tiles, count = _extend_plan_shapes(slots, query_start, num_tokens, tile_tokens)
    extend_plan_kernel[(rows + 1,)](
        slots, query_start, tiles, count, rows, num_tokens, tile_tokens, triton.next_power_of_2(rows + 1)
    )
    return tiles, count


def _padded_dim(head_dim: int) -> int:
    return max(triton.next_power_of_2(head_dim), 16)


def _tile_rows(q: torch.Tensor, wanted: int, group: int, most: int) -> int:
    """Rows of a query tile: a power of two that holds one token's heads and ``wanted`` rows, or what fits."""
    fits = 16 if q.dtype == torch.float32 else min(most, 2**14 // _padded_dim(q.shape[-1]))
    return triton.next_power_of_2(max(min(wanted, fits), group, 16))


def _launch_options(q: torch.Tensor, tile_rows: int) -> dict[str, int]:
    """Two accumulators per row must fit the registers, and two buffers of keys and values shared memory."""
    dim, size = _padded_dim(q.shape[-1]), q.element_size()
    wide = tile_rows * max(dim, 128) >= 2**14 or q.dtype == torch.float32
    return {"num_warps": 8 if wide else 4, "num_stages": 5 if dim * size <= 256 else 3}


def _programs(device: torch.device) -> int:
    """Programs that share a round's work: several waves, so that the hardware balances uneven rows."""
    if device.type != "cuda":
        return 4
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count


def _attended(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def launch_attention_round(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    work: torch.Tensor,
    count: torch.Tensor,
    arrivals: torch.Tensor,
    scale: float,
    window: int,
    **options: int,
) -> torch.Tensor:
    """See :func:`attention_round`. ``options`` override the launch's (for tuning)."""
    _, heads, head_dim = q.shape
    (rows, width, kv_heads), group = arrivals.shape, heads // arrivals.shape[2]
    tile_rows = _tile_rows(q, width * group, group, most=64)
    tile_tokens = min(tile_rows // group, width)
    shares = triton.cdiv(width, tile_tokens) * kv_heads  # per work item
    capacity = work.shape[0]
    state = q.new_empty((capacity - rows) * width, heads, 2, dtype=torch.float32)
    acc = q.new_empty((capacity - rows) * width, heads, head_dim, dtype=torch.float32)
    out = _attended(q)
    options = _launch_options(q, tile_rows) | {"programs": _programs(q.device)} | options
    programs = min(options.pop("programs"), capacity * shares)
    round_kernel[(programs,)](
        q, k_cache, v_cache, page_table, positions, work, count, arrivals, state, acc, out,
        page_table.stride(0), k_cache.stride(0), window, scale * LOG2_E,
        width, heads, kv_heads, head_dim, _padded_dim(head_dim), k_cache.shape[2], tile_rows,
        triton.next_power_of_2(tile_tokens * group), KEYS, SPLIT, window > 0, **options,
    )  # fmt: skip
    return out


def launch_attention_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    tiles: torch.Tensor,
    count: torch.Tensor,
    tile_tokens: int,
    scale: float,
    window: int,
    **options: int,
) -> torch.Tensor:
    """See :func:`attention_extend`. ``options`` override the launch's (for tuning)."""
    _, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    tile_rows = _tile_rows(q, tile_tokens * group, group, most=128)
    parts = triton.cdiv(tile_tokens, tile_rows // group)
    out = _attended(q)
    options = _launch_options(q, tile_rows) | options
    extend_kernel[(tiles.shape[0] * parts * kv_heads,)](
        q, k_cache, v_cache, page_table, positions, tiles, count, out,
        page_table.stride(0), k_cache.stride(0), window, scale * LOG2_E,
        heads, kv_heads, head_dim, _padded_dim(head_dim), k_cache.shape[2], tile_rows, parts, KEYS, SPLIT,
        window > 0, **options,
    )  # fmt: skip
    return out


define(
    "attention_plan(Tensor slots, Tensor kv_len, int width, int num_kv_heads, int partials, int programs)"
    " -> (Tensor, Tensor, Tensor)"
)
define("attention_extend_plan(Tensor slots, Tensor query_start, int num_tokens, int tile_tokens) -> (Tensor, Tensor)")
define(
    "attention_round(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor positions,"
    " Tensor work, Tensor count, Tensor(a!) arrivals, float scale, int window) -> Tensor"
)
define(
    "attention_extend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor positions,"
    " Tensor tiles, Tensor count, int tile_tokens, float scale, int window) -> Tensor"
)
register("attention_plan", cuda=launch_attention_plan, cpu=attention_plan_cpu, meta=_plan_shapes)
register(
    "attention_extend_plan",
    cuda=launch_attention_extend_plan,
    cpu=attention_extend_plan_cpu,
    meta=_extend_plan_shapes,
)
register("attention_round", cuda=launch_attention_round, cpu=attention_round_cpu, meta=_attended)
register("attention_extend", cuda=launch_attention_extend, cpu=attention_extend_cpu, meta=_attended)


class RoundPlan(NamedTuple):
    """How a round's rows are cut into work.

    work [partials + R, 5]: (row, slot, kv_len, split, partial); split and partial are -1 for a row that one
        program per KV head walks whole.
    count [1]: entries of ``work`` in use.
    arrivals [R, W, Hkv]: per query tile, splits that have arrived; 0 between layers.
    """

    work: torch.Tensor
    count: torch.Tensor
    arrivals: torch.Tensor


class ExtendPlan(NamedTuple):
    """How an extend pass's tokens are cut into query tiles.

    tiles [ceil(T / tile_tokens) + R + 1, 3]: (slot, first token, end token), in order of tokens.
    count [1]: tiles in use.
    """

    tiles: torch.Tensor
    count: torch.Tensor
    tile_tokens: int


def attention_plan(
    slots: torch.Tensor, kv_len: torch.Tensor, width: int, num_kv_heads: int, partials: int, programs: int
) -> RoundPlan:
    """Plan a round: slots [R], kv_len [R] (keys each row sees; 0 for a padding row).

    A row whose splits exceed a program's fair share of the pass, ``ceil`` of all splits over ``programs``
    (programs the device runs at a time), is split; the others, and those for which ``partials`` (splits the
    workspace holds) leaves no room, are walked whole. The choice moves time, never bits.
    """
    return RoundPlan(*torch.ops.unisono.attention_plan(slots, kv_len, width, num_kv_heads, partials, programs))


def attention_extend_plan(
    slots: torch.Tensor, query_start: torch.Tensor, num_tokens: int, tile_tokens: int
) -> ExtendPlan:
    """Plan an extend pass of ``num_tokens`` tokens: slots [R], query_start [R + 1].

    Query tiles hold ``tile_tokens`` tokens × G heads at most. Tokens from ``query_start[R]`` on are padding
    and get tiles of their own, so that their outputs are written too.
    """
    planned = torch.ops.unisono.attention_extend_plan(slots, query_start, num_tokens, tile_tokens)
    return ExtendPlan(*planned, tile_tokens)


def attention_round(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    plan: RoundPlan,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Attend R rows of equal width W over the paged cache.

    q [R · W, Hq, D]; k_cache, v_cache [NP, Hkv, P, D] of q's dtype and equal strides; page_table [S, MP];
    positions [R · W]. A token sees keys at p ≤ its position (p > position - window where window > 0); one at
    position -1 sees nothing and yields zeros. fp32 accumulation, P rounded to the cache's dtype.
    Returns [R · W, Hq · D] in q's dtype.
    """
    return torch.ops.unisono.attention_round(q, k_cache, v_cache, page_table, positions, *plan, scale, window)


def attention_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    plan: ExtendPlan,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Attend the ragged rows of an extend pass: as :func:`attention_round`, q [T, Hq, D], positions [T]."""
    return torch.ops.unisono.attention_extend(q, k_cache, v_cache, page_table, positions, *plan, scale, window)
