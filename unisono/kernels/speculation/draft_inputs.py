"""Inputs of a draft model's passes: token ids from the device's history, positions and KV slot mappings.

Owns the ops ``draft_inputs`` (a pass inside a round, at positions before, at and after the last committed token) and
``draft_extend_inputs`` (a pass over prompt chunks, each of which begins one token early). Drafters with a KV cache of
their own call them, once per pass, inside the graph. Both only read slots.

Chunks begin one token early because a draft model reads a round's last draft only in the next round, and a request may
end between the two. Its last page then reaches the prefix cache without the draft model's key of the page's last
position. A request that continues from that page computes this key again.

Shapes: R rows, k drafts, W width, T tokens, S slots, N tokens of history, MP pages per slot, P page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, SymbolicInt, ints, op
from unisono.types import FinishReason

RUNNING = tl.constexpr(int(FinishReason.RUNNING))
NEVER = tl.constexpr(2**31 - 1)

TOKENS_PER_PROGRAM = 128

DraftInputs = tuple[Tensor, Tensor, Tensor, Tensor]
DraftExtendInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _slot_mapping(page_table, slot, max_pages, at, written, spare, PAGE: tl.constexpr):
    """Cache slot of position ``at``: in its page, or at offset ``spare`` of the padding page."""
    page = tl.load(page_table + slot.to(tl.int64) * max_pages + at // PAGE, mask=written, other=0)
    return tl.where(written, page * PAGE + at % PAGE, spare % PAGE)


@triton.jit(do_not_specialize=["first"])
def _draft_inputs_kernel(
    slots, tables, drafts, history, length, max_length, status, page_table, token_ids, positions, slot_mapping, kv_len,
    stride, max_tokens, max_pages, K, first, W, vocab_size, PAGE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    field = slot * stride
    tokens = tl.load(length + field)
    end = tl.load(max_length + field)
    active = tl.load(status + field) == RUNNING

    j = tl.arange(0, BLOCK_W)
    at = tokens + first + j
    real = active & (j < W) & (at >= 0)
    committed = tl.load(history + slot.to(tl.int64) * max_tokens + at, mask=real & (at < tokens), other=0)
    drafted = tl.load(drafts + row * K + at - tokens, mask=real & (at >= tokens), other=0)
    token = tl.where(at < tokens, committed, drafted)
    known = (token >= 0) & (token < vocab_size)
    place = _slot_mapping(page_table, tl.load(tables + row), max_pages, at, real & (at < end), j, PAGE)

    out = row * W + j
    tl.store(token_ids + out, tl.where(known, token, 0), mask=j < W)
    tl.store(positions + out, tl.where(real, tl.minimum(at, end - 1), -1), mask=j < W)
    tl.store(slot_mapping + out, place, mask=j < W)
    tl.store(kv_len + row, tl.where(active, tl.maximum(tl.minimum(tokens + first + W, end), 0), 0))


@triton.jit
def _draft_extend_inputs_kernel(
    slots, query_start, start, history, page_table, token_ids, positions, slot_mapping, kv_len, draft_start,
    max_tokens, max_pages, R, T, vocab_size, PAGE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK_R)
    begins = tl.load(query_start + r, mask=r <= R, other=0)
    ends = tl.load(query_start + r + 1, mask=r < R, other=NEVER - BLOCK_R) + r + 1
    if tl.program_id(0) == 0:
        tl.store(draft_start + r, begins + r, mask=r <= R)
        count = ends - r - 1 - begins
        tl.store(kv_len + r, tl.load(start + r, mask=r < R, other=0) + count, mask=r < R)

    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), axis=1)
    inside = (t < T) & (row < R)
    origin = tl.load(start + row, mask=inside, other=0) - tl.load(query_start + row, mask=inside, other=0)
    at = origin + t - row - 1
    real = inside & (at >= 0)
    slot = tl.load(slots + row, mask=real, other=0)
    token = tl.load(history + slot.to(tl.int64) * max_tokens + at, mask=real, other=0)
    known = (token >= 0) & (token < vocab_size)
    tl.store(token_ids + t, tl.where(known, token, 0), mask=t < T)
    tl.store(positions + t, tl.where(real, at, -1), mask=t < T)
    tl.store(slot_mapping + t, _slot_mapping(page_table, slot, max_pages, at, real, t, PAGE), mask=t < T)


def _draft_inputs_meta(slots: Tensor, width: int) -> DraftInputs:
    token_ids, positions, slot_mapping = (slots.new_empty(slots.shape[0] * width) for _ in range(3))
    return token_ids, positions, slot_mapping, slots.new_empty(slots.shape[0])


def launch_draft_inputs(
    slots: Tensor, drafts: Tensor, history: Tensor, length: Tensor, max_length: Tensor, status: Tensor,
    page_table: Tensor, page_size: int, vocab_size: int, first: int, width: int, tables: Tensor | None = None,
) -> DraftInputs:  # fmt: skip
    if not length.stride(0) == max_length.stride(0) == status.stride(0):
        raise ValueError("slot fields have different strides: make them views of one arena")
    out = _draft_inputs_meta(slots, width)
    _draft_inputs_kernel[(slots.shape[0],)](
        slots, slots if tables is None else tables, drafts, history, length, max_length, status, page_table, *out,
        length.stride(0), history.stride(0), page_table.stride(0), drafts.stride(0), first, width, vocab_size,
        PAGE=page_size, BLOCK_W=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out


def _slot_mapping_cpu(
    page_table: Tensor, slot: Tensor, at: Tensor, written: Tensor, spare: Tensor, page_size: int
) -> Tensor:
    column = (at // page_size).where(written, 0).long()
    return (page_table[slot, column] * page_size + at % page_size).where(written, spare % page_size)


def _draft_extend_inputs_meta(slots: Tensor, num_tokens: int) -> DraftExtendInputs:
    rows = slots.shape[0]
    token_ids, positions, slot_mapping = (slots.new_empty(num_tokens + rows) for _ in range(3))
    return token_ids, positions, slot_mapping, slots.new_empty(rows), slots.new_empty(rows + 1)


def launch_draft_extend_inputs(
    slots: Tensor, query_start: Tensor, start: Tensor, history: Tensor, page_table: Tensor, page_size: int,
    vocab_size: int, num_tokens: int,
) -> DraftExtendInputs:  # fmt: skip
    out = _draft_extend_inputs_meta(slots, num_tokens)
    rows, total = slots.shape[0], out[0].shape[0]
    _draft_extend_inputs_kernel[(triton.cdiv(total, TOKENS_PER_PROGRAM),)](
        slots, query_start, start, history, page_table, *out,
        history.stride(0), page_table.stride(0), rows, total, vocab_size,
        PAGE=page_size, BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_R=triton.next_power_of_2(rows + 1),
    )  # fmt: skip
    return out


@op(cuda=launch_draft_inputs, meta=_draft_inputs_meta)
def draft_inputs(
    slots: Tensor, drafts: Tensor, history: Tensor, length: Tensor, max_length: Tensor, status: Tensor,
    page_table: Tensor, page_size: int, vocab_size: int, first: int, width: int, tables: Tensor | None = None,
) -> DraftInputs:  # fmt: skip
    """Compute the inputs of a draft model at positions ``length + first … length + first + width - 1`` of each row.

    slots [R], drafts [R, k], history [S, N]; length, max_length, status [S]; page_table [S, MP]; tables [R]: row of
    the page table that each row reads (None: its slot's); all int32. The token at position p is history[p] below
    ``length`` and drafts[p - length] from there on, so first + width ≤ k. An id of ``vocab_size`` or more reads as 0.
    Returns int32 (token_ids [R * width], positions [R * width], slot_mapping [R * width], kv_len [R]).

    At and beyond ``max_length``, for which no page is reserved, a token keeps the last position and writes to padding
    page 0. Negative positions and inactive rows have position -1 and token 0; an inactive row has kv_len 0.
    """
    slot = slots.long()[:, None]
    tokens, end, active = length[slot], max_length[slot], status[slot] == RUNNING.value
    j = torch.arange(width, dtype=torch.int32)
    at = tokens + first + j
    real = active & (at >= 0)
    committed, drafted = real & (at < tokens), real & (at >= tokens)
    token = history[slot, at.where(committed, 0).long()].where(committed, 0)
    token = drafts.gather(1, (at - tokens).where(drafted, 0).long()).where(drafted, token)
    token = token.where((token >= 0) & (token < vocab_size), 0)
    written = real & (at < end)
    table = slot if tables is None else tables.long()[:, None]
    slot_mapping = _slot_mapping_cpu(page_table, table, at, written, j, page_size)
    kv_len = torch.minimum(tokens + first + width, end).clamp_min(0).where(active, 0)
    positions = torch.minimum(at, end - 1).where(real, -1)
    return token.flatten(), positions.flatten(), slot_mapping.flatten(), kv_len.flatten()


@op(cuda=launch_draft_extend_inputs, meta=_draft_extend_inputs_meta)
def draft_extend_inputs(
    slots: Tensor, query_start: Tensor, start: Tensor, history: Tensor, page_table: Tensor, page_size: int,
    vocab_size: int, num_tokens: SymbolicInt,
) -> DraftExtendInputs:  # fmt: skip
    """Compute the tokens of an extend pass for a draft model: each row's own, and the one before them.

    slots [R], query_start [R + 1] and start [R] describe the target's pass of ``num_tokens`` tokens, as in
    :func:`unisono.kernels.speculation.rounds.extend_inputs`; history [S, N], page_table [S, MP]; all int32. Returns
    int32 (token_ids [T], positions [T], slot_mapping [T], kv_len [R], query_start [R + 1]) of T = num_tokens + R.

    Row r owns tokens query_start[r] + r … query_start[r + 1] + r + 1, from position start[r] - 1 on. A token at
    position -1 is padding, as are tokens of no row: position -1, token 0, KV into padding page 0. A token that is not
    an id below ``vocab_size`` reads as 0.
    """
    rows = slots.shape[0]
    draft_start = query_start + torch.arange(rows + 1, dtype=torch.int32)
    t = torch.arange(num_tokens + rows, dtype=torch.int32)
    row = torch.searchsorted(draft_start[1:].contiguous(), t, right=True)
    inside = row < rows
    row = row.clamp_max(rows - 1)
    at = start[row] - 1 + t - draft_start[row]
    real = inside & (at >= 0)
    slot = slots[row].long()
    token = history[slot, at.where(real, 0).long()].where(real, 0)
    slot_mapping = _slot_mapping_cpu(page_table, slot, at, real, t, page_size)
    token = token.where((token >= 0) & (token < vocab_size), 0)
    return token, at.where(real, -1), slot_mapping, start + query_start.diff(), draft_start


AOT: list[AotCase] = [
    *(
        AotCase(
            _draft_inputs_kernel,
            ints(
                "slots tables drafts history length max_length status page_table token_ids positions slot_mapping"
                " kv_len",
                "stride max_tokens max_pages K first W vocab_size",
            ),
            {"PAGE": 16, "BLOCK_W": width},
            num_warps=1,
        )
        for width in (1, 2)
    ),
    AotCase(
        _draft_extend_inputs_kernel,
        ints(
            "slots query_start start history page_table token_ids positions slot_mapping kv_len draft_start",
            "max_tokens max_pages R T vocab_size",
        ),
        {"PAGE": 16, "BLOCK_T": TOKENS_PER_PROGRAM, "BLOCK_R": 64},
    ),
]
