"""Rounds whose requests share a budget of tokens: the number of drafts of each request, and the target's inputs.

Owns the ops ``share_drafts`` and ``shared_inputs``. A request's tokens are the last committed one and its drafts; the
tokens of all requests lie one after another (*compact*), as those of a prompt pass. The drafts that are verified are
the ones most likely to be reached: the product of the rates of a draft and of those before it. Neither op writes slots.

Shapes: R rows, K drafts per row at most, W = 1 + K, T tokens of the pass, S slots, MP pages per slot, P page size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, SymbolicInt, empty_like, ints, one_stride, op
from unisono.types import FinishReason

RUNNING = tl.constexpr(int(FinishReason.RUNNING))
UNREACHED, INACTIVE = tl.constexpr(-1.0), tl.constexpr(-2.0)

OTHERS = 1024
"""Drafts that a program of ``share_drafts`` compares with its own at a time."""

PADDING_TOKENS = 1024
"""Padding tokens that a program of ``shared_inputs`` writes at a time."""


class SharedInputs(NamedTuple):
    """The target's inputs in a round of T compact tokens. All int32.

    token_ids, positions (-1: padding), slot_mapping [T]; kv_len [R]; query_start [R + 1]: first token of each row.
    owners [T]: the row of each token; padding has the last row.
    places [R · W]: the token at column j of row r; columns after a row's drafts have its last token, and rows without
    tokens any token of the pass. sampled [R · W]: the same, and -1 for these columns and rows.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    kv_len: Tensor
    query_start: Tensor
    owners: Tensor
    places: Tensor
    sampled: Tensor


@triton.jit
def _reach_kernel(
    drafts, rates, slots, length, max_length, status, reach, stride, K, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    field = tl.load(slots + row) * stride
    active = tl.load(status + field) == RUNNING
    room = tl.load(max_length + field) - tl.load(length + field)
    j = tl.arange(0, BLOCK_K)
    draft = tl.load(drafts + row * K + j, mask=j < K, other=-1)
    rate = tl.load(rates + row * K + j, mask=j < K, other=0.0)
    first_missing = tl.min(tl.where(draft < 0, j, BLOCK_K))
    reached = tl.cumprod(tl.minimum(tl.maximum(rate, 0.0), 1.0), 0)
    value = tl.where((j < first_missing) & (j < room), reached, UNREACHED)
    tl.store(reach + row * K + j, tl.where(active, value, INACTIVE), mask=j < K)


@triton.jit
def _share_drafts_kernel(
    drafts, reach, drafted, found, widths, R, K, T, BLOCK_K: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    j = tl.arange(0, BLOCK_K)
    own = tl.load(reach + row * K + j, mask=j < K, other=INACTIVE)
    order = j * R + row  # of equal drafts, the earlier in its row comes first
    before = tl.zeros((BLOCK_K,), dtype=tl.int32)
    running = tl.zeros((), dtype=tl.int32)
    for start in range(0, R * K, OTHERS):
        at = start + tl.arange(0, OTHERS)
        other = tl.load(reach + at, mask=at < R * K, other=INACTIVE)
        other_order = (at % K) * R + at // K
        running += tl.sum(((at % K == 0) & (other != INACTIVE)).to(tl.int32))
        ahead = (other[None, :] > own[:, None]) | (
            (other[None, :] == own[:, None]) & (other_order[None, :] < order[:, None])
        )
        before += tl.sum((ahead & (other[None, :] >= 0)).to(tl.int32), axis=1)
    active = tl.max(own) != INACTIVE
    kept = (own >= 0) & (before < T - running)
    count = tl.sum(kept.to(tl.int32))
    tl.store(found + row, tl.sum((own >= 0).to(tl.int32)))
    tl.store(drafted + row, count)
    tl.store(widths + row, tl.where(active, 1 + count, 0))
    tl.store(drafts + row * K + j, -1, mask=(j < K) & ~kept)


@triton.jit
def _shared_inputs_kernel(
    slots, drafts, widths, length, last_token, page_table,
    token_ids, positions, slot_mapping, kv_len, query_start, owners, places, sampled,
    stride, max_pages, R, K, T, PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    r = tl.arange(0, BLOCK_R)
    each = tl.load(widths + r, mask=r < R, other=0)
    first = tl.sum(tl.where(r < row, each, 0))
    tl.store(query_start + row, first)
    if row < R:
        slot = tl.load(slots + row)
        width = tl.load(widths + row)
        tokens = tl.load(length + slot * stride)
        j = tl.arange(0, BLOCK_W)
        real = j < width
        at = tokens - 1 + j
        draft = tl.load(drafts + row * K + j - 1, mask=real & (j > 0), other=0)
        token = tl.where(j == 0, tl.load(last_token + slot * stride), draft)
        page = tl.load(page_table + slot.to(tl.int64) * max_pages + at // PAGE, mask=real, other=0)
        tl.store(token_ids + first + j, token, mask=real)
        tl.store(positions + first + j, at, mask=real)
        tl.store(slot_mapping + first + j, page * PAGE + at % PAGE, mask=real)
        tl.store(owners + first + j, row, mask=real)
        place = tl.minimum(first + tl.minimum(j, tl.maximum(width - 1, 0)), T - 1)
        tl.store(places + row * (K + 1) + j, place, mask=j < K + 1)
        tl.store(sampled + row * (K + 1) + j, tl.where(real, first + j, -1), mask=j < K + 1)
        tl.store(kv_len + row, tl.where(width > 0, tokens - 1 + width, 0))
    else:
        for start in range(0, T, PADDING):
            t = start + tl.arange(0, PADDING)
            padding = (t >= first) & (t < T)
            tl.store(token_ids + t, 0, mask=padding)
            tl.store(positions + t, -1, mask=padding)
            tl.store(slot_mapping + t, t % PAGE, mask=padding)
            tl.store(owners + t, R - 1, mask=padding)


def launch_share_drafts(
    drafts: Tensor, rates: Tensor, slots: Tensor, length: Tensor, max_length: Tensor, status: Tensor, tokens: int,
    drafted: Tensor, found: Tensor,
) -> Tensor:  # fmt: skip
    rows, k = drafts.shape
    reach, block = torch.empty_like(rates), triton.next_power_of_2(k)
    widths = torch.empty_like(slots)
    _reach_kernel[(rows,)](
        drafts, rates, slots, length, max_length, status, reach, one_stride(length, max_length, status), k,
        BLOCK_K=block, num_warps=1,
    )  # fmt: skip
    _share_drafts_kernel[(rows,)](
        drafts, reach, drafted, found, widths, rows, k, tokens, BLOCK_K=block, OTHERS=OTHERS, num_warps=4
    )
    return widths


def _shared_inputs_meta(slots: Tensor, drafts: Tensor, tokens: int) -> SharedInputs:
    rows, k = drafts.shape
    sizes = (tokens, tokens, tokens, rows, rows + 1, tokens, rows * (k + 1), rows * (k + 1))
    return SharedInputs(*(slots.new_empty(size) for size in sizes))


def launch_shared_inputs(
    slots: Tensor, drafts: Tensor, widths: Tensor, length: Tensor, last_token: Tensor, page_table: Tensor,
    page_size: int, tokens: int,
) -> SharedInputs:  # fmt: skip
    out = _shared_inputs_meta(slots, drafts, tokens)
    rows, k = drafts.shape
    _shared_inputs_kernel[(rows + 1,)](
        slots, drafts, widths, length, last_token, page_table, *out,
        one_stride(length, last_token), page_table.stride(0), rows, k, tokens,
        PAGE=page_size, BLOCK_R=triton.next_power_of_2(rows), BLOCK_W=triton.next_power_of_2(k + 1),
        PADDING=PADDING_TOKENS, num_warps=1,
    )  # fmt: skip
    return out


@op(cuda=launch_share_drafts, meta=lambda slots: empty_like(slots))
def share_drafts(
    drafts: Mutated[Tensor], rates: Tensor, slots: Tensor, length: Tensor, max_length: Tensor, status: Tensor,
    tokens: int, drafted: Mutated[Tensor], found: Mutated[Tensor],
) -> Tensor:  # fmt: skip
    """Keep the drafts most likely to be reached, as many as a pass of ``tokens`` tokens holds; set the others to -1.

    drafts [R, K] int32 contiguous, -1: none. rates [R, K] fp32: probability of each draft if those before it are
    accepted; values outside of 0 … 1 count as the nearest of both. slots [R]; length, max_length, status [S] int32.
    tokens: at least the number of active rows. Writes the drafts kept of each row into drafted [R] int32, and those it
    had into found [R]. Returns the tokens of each row [R] int32: 1 + drafted; 0 for a row without an active request.

    Drafts after a missing one, and at or beyond ``max_length``, are not reached. Of equally likely drafts the earlier
    in its row comes first, then that of the lower row.
    """
    rows, k = drafts.shape
    slot = slots.long()
    active = status[slot] == RUNNING.value
    place = torch.arange(k)
    real = ((drafts >= 0).cumprod(1) > 0) & (place < (max_length - length)[slot][:, None]) & active[:, None]
    reach = rates.clamp(0, 1).cumprod(1)
    order = reach.masked_fill(~real, -1.0).t().flatten().sort(descending=True, stable=True).indices
    budget = min(max(tokens - int(active.sum()), 0), int(real.sum()))
    kept = torch.zeros(k * rows, dtype=torch.bool).index_fill(0, order[:budget], True).view(k, rows).t()
    drafts.masked_fill_(~kept, -1)
    drafted.copy_(kept.sum(1))
    found.copy_(real.sum(1))
    return (drafted + 1) * active.int()


@op(cuda=launch_shared_inputs, meta=_shared_inputs_meta)
def shared_inputs(
    slots: Tensor, drafts: Tensor, widths: Tensor, length: Tensor, last_token: Tensor, page_table: Tensor,
    page_size: int, tokens: SymbolicInt,
) -> SharedInputs:  # fmt: skip
    """Compute the target's inputs in a round of ``tokens`` compact tokens.

    slots [R], drafts [R, K], widths [R] as left by :func:`share_drafts`; length, last_token [S]; page_table [S, MP];
    all int32. Tokens after those of all rows are padding: position -1, keys and values into padding page 0.
    """
    rows, k = drafts.shape
    slot, t = slots.long(), torch.arange(tokens, dtype=torch.int32)
    ends = widths.cumsum(0, dtype=torch.int32)
    starts = torch.cat((ends.new_zeros(1), ends))
    owners = torch.searchsorted(ends, t, right=True)
    real = owners < rows
    owners = owners.clamp_max(rows - 1)
    step = t - starts[owners]
    given = torch.cat((last_token[slot][:, None], drafts), 1)
    ids = given[owners, step.clamp(0, k).long()].where(real, 0)
    positions = (length[slot][owners] - 1 + step).where(real, -1)
    at = positions.clamp_min(0)
    page = page_table[slot[owners], (at // page_size).long()]
    mapping = (page * page_size + at % page_size).where(real, t % page_size)
    column = torch.minimum(torch.arange(k + 1), (widths - 1).clamp_min(0)[:, None])
    places = (starts[:-1, None] + column).clamp_max(tokens - 1).int().flatten()
    sampled = places.where((torch.arange(k + 1) < widths[:, None]).flatten(), -1)
    kv_len = (length[slot] - 1 + widths).where(widths > 0, 0)
    return SharedInputs(ids, positions, mapping, kv_len, starts, owners.int(), places, sampled)


AOT: list[AotCase] = [
    AotCase(
        _reach_kernel,
        ints("drafts slots length max_length status", "stride K") | {"rates": "*fp32", "reach": "*fp32"},
        {"BLOCK_K": 8},
        num_warps=1,
    ),
    AotCase(
        _share_drafts_kernel,
        ints("drafts drafted found widths", "R K T") | {"reach": "*fp32"},
        {"BLOCK_K": 16, "OTHERS": OTHERS},
    ),
    AotCase(
        _shared_inputs_kernel,
        ints(
            "slots drafts widths length last_token page_table token_ids positions slot_mapping kv_len query_start"
            " owners places sampled",
            "stride max_pages R K T",
        ),
        {"PAGE": 16, "BLOCK_R": 64, "BLOCK_W": 16, "PADDING": PADDING_TOKENS},
        num_warps=1,
    ),
]
