"""Device work around a forward pass: inputs before it, acceptance and commit after it.

Owns the ops ``round_inputs``, ``extend_inputs`` and ``commit``. They are the only kernels that know the
life cycle of a slot. The engine's programs call them, once per pass, inside the graph. ``commit`` is the only op
that writes slots: lengths, last tokens and statuses change nowhere else on the device.

Slot fields are views ``[S]`` of one int32 arena and share a stride. A row is active while its slot's status
is RUNNING; the padding slot is always FREE.

Shapes: R rows, W width (1 + drafts), T tokens, S slots, MP pages per slot, P page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, SymbolicInt, ints, one_stride, op
from unisono.types import MAX_STOP_IDS, FinishReason

RUNNING = tl.constexpr(int(FinishReason.RUNNING))
STOP = tl.constexpr(int(FinishReason.STOP))
LENGTH = tl.constexpr(int(FinishReason.LENGTH))
NEVER = tl.constexpr(2**31 - 1)
STOP_IDS = tl.constexpr(MAX_STOP_IDS)

TOKENS_PER_PROGRAM = 128


@triton.jit
def _round_inputs_kernel(
    slots, tables, drafts, length, max_length, status, last_token, page_table, token_ids, positions, slot_mapping,
    kv_len, stride, max_pages, W, PAGE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    field = slot * stride
    tokens = tl.load(length + field)
    end = tl.load(max_length + field)
    active = tl.load(status + field) == RUNNING

    j = tl.arange(0, BLOCK_W)
    inside = j < W
    at = tokens - 1 + j
    draft = tl.load(drafts + row * (W - 1) + j - 1, mask=inside & (j > 0), other=0)
    token = tl.where(j == 0, tl.load(last_token + field), tl.maximum(draft, 0))
    written = inside & active & (at < end)
    table = tl.load(tables + row).to(tl.int64)
    page = tl.load(page_table + table * max_pages + at // PAGE, mask=written, other=0)

    out = row * W + j
    tl.store(token_ids + out, tl.where(active, token, 0), mask=inside)
    tl.store(positions + out, tl.where(active, tl.minimum(at, end - 1), -1), mask=inside)
    tl.store(slot_mapping + out, tl.where(written, page * PAGE + at % PAGE, j % PAGE), mask=inside)
    tl.store(kv_len + row, tl.where(active, tl.minimum(tokens - 1 + W, end), 0))


@triton.jit
def _extend_inputs_kernel(
    slots, query_start, start, page_table, positions, slot_mapping, kv_len,
    max_pages, R, T, PAGE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK_R)
    ends = tl.load(query_start + r + 1, mask=r < R, other=NEVER)
    if tl.program_id(0) == 0:
        begins = tl.load(query_start + r, mask=r < R, other=0)
        tl.store(kv_len + r, tl.load(start + r, mask=r < R, other=0) + ends - begins, mask=r < R)

    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), axis=1)
    real = (t < T) & (row < R)
    first = tl.load(start + row, mask=real, other=0) - tl.load(query_start + row, mask=real, other=0)
    at = tl.where(real, first + t, -1)
    slot = tl.load(slots + row, mask=real, other=0)
    page = tl.load(page_table + slot * max_pages + at // PAGE, mask=real, other=0)
    tl.store(positions + t, at, mask=t < T)
    tl.store(slot_mapping + t, tl.where(real, page * PAGE + at % PAGE, t % PAGE), mask=t < T)


@triton.jit
def _commit_kernel(
    tokens, drafts, slots, length, max_length, status, last_token, stop_ids, history, result,
    stride, max_tokens, W, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    field = slot * stride
    before = tl.load(length + field)
    state = tl.load(status + field)
    active = state == RUNNING
    room = tl.maximum(tl.load(max_length + field) - before, 0)

    j = tl.arange(0, BLOCK_W)
    token = tl.load(tokens + row * W + j, mask=j < W, other=-1)
    draft = tl.load(drafts + row * (W - 1) + j, mask=j < W - 1, other=-1)
    accepted = tl.min(tl.where((draft == token) & (j < W - 1), NEVER, j))
    count = tl.where(active, tl.minimum(accepted + 1, room), 0)

    stops = tl.load(stop_ids + field + tl.arange(0, STOP_IDS))
    is_stop = tl.max((token[:, None] == stops[None, :]).to(tl.int32), axis=1) > 0
    first_stop = tl.min(tl.where(is_stop & (j < count), j, NEVER))
    stopped = first_stop < count
    full = active & (count == room)
    count = tl.where(stopped, first_stop + 1, count)
    state = tl.where(stopped, STOP, tl.where(full, LENGTH, state))
    last = tl.max(tl.where(j == count - 1, token, -1))

    tl.store(length + field, before + count, mask=active)
    tl.store(status + field, state, mask=active)
    tl.store(last_token + field, last, mask=count > 0)
    tl.store(history + slot.to(tl.int64) * max_tokens + before + j, token, mask=j < count)
    out = result + row * (W + 2)
    tl.store(out, count)
    tl.store(out + 1, state)
    tl.store(out + 2 + j, tl.where(j < count, token, -1), mask=j < W)


@triton.jit
def _limit_drafts_kernel(drafts, slots, max_drafts, drafted, stride, K, BLOCK_K: tl.constexpr):
    row = tl.program_id(0)
    most = tl.load(max_drafts + tl.load(slots + row) * stride)
    j = tl.arange(0, BLOCK_K)
    draft = tl.load(drafts + row * K + j, mask=j < K, other=-1)
    tl.store(drafts + row * K + j, -1, mask=(j < K) & (j >= most))
    tl.store(drafted + row, tl.sum(((draft >= 0) & (j < most)).to(tl.int32)))


RoundInputs = tuple[Tensor, Tensor, Tensor, Tensor]
ExtendInputs = tuple[Tensor, Tensor, Tensor]


def _round_inputs_meta(slots: Tensor, drafts: Tensor) -> RoundInputs:
    tokens = slots.shape[0] * (drafts.shape[1] + 1)
    token_ids, positions, slot_mapping = (slots.new_empty(tokens) for _ in range(3))
    return token_ids, positions, slot_mapping, slots.new_empty(slots.shape[0])


def launch_round_inputs(
    slots: Tensor, drafts: Tensor, length: Tensor, max_length: Tensor, status: Tensor,
    last_token: Tensor, page_table: Tensor, page_size: int, tables: Tensor | None = None,
) -> RoundInputs:  # fmt: skip
    out = _round_inputs_meta(slots, drafts)
    width = drafts.shape[1] + 1
    _round_inputs_kernel[(slots.shape[0],)](
        slots, slots if tables is None else tables, drafts.contiguous(),
        length, max_length, status, last_token, page_table, *out,
        one_stride(length, max_length, status, last_token), page_table.stride(0), width,
        PAGE=page_size, BLOCK_W=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out


def _extend_inputs_meta(slots: Tensor, num_tokens: int) -> ExtendInputs:
    return slots.new_empty(num_tokens), slots.new_empty(num_tokens), slots.new_empty(slots.shape[0])


def launch_extend_inputs(
    slots: Tensor, query_start: Tensor, start: Tensor, page_table: Tensor,
    page_size: int, num_tokens: int,
) -> ExtendInputs:  # fmt: skip
    out = _extend_inputs_meta(slots, num_tokens)
    rows = slots.shape[0]
    _extend_inputs_kernel[(max(triton.cdiv(num_tokens, TOKENS_PER_PROGRAM), 1),)](
        slots, query_start, start, page_table, *out, page_table.stride(0), rows, num_tokens,
        PAGE=page_size, BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_R=triton.next_power_of_2(rows),
    )  # fmt: skip
    return out


def launch_commit(
    tokens: Tensor, drafts: Tensor, slots: Tensor, length: Tensor, max_length: Tensor,
    status: Tensor, last_token: Tensor, stop_ids: Tensor, history: Tensor,
) -> Tensor:  # fmt: skip
    result = tokens.new_empty(tokens.shape[0], tokens.shape[1] + 2)
    rows, width = tokens.shape
    _commit_kernel[(rows,)](
        tokens.contiguous(), drafts.contiguous(), slots, length, max_length, status, last_token, stop_ids, history,
        result,
        one_stride(length, max_length, status, last_token, stop_ids), history.stride(0), width,
        BLOCK_W=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return result


def launch_limit_drafts(drafts: Tensor, slots: Tensor, max_drafts: Tensor, drafted: Tensor) -> None:
    rows, k = drafts.shape
    _limit_drafts_kernel[(rows,)](
        drafts, slots, max_drafts, drafted, max_drafts.stride(0), k, BLOCK_K=triton.next_power_of_2(k), num_warps=1
    )


def force_drafts(drafts: Tensor, sampled: Tensor, slots: Tensor, length: Tensor, mean: float) -> None:
    """Overwrite drafts [R, k] so that ``mean`` tokens per round are committed on average. For benchmarks only.

    The accepted count of a row is floor or ceil of ``mean`` - 1, by a hash of its length: no host value, so
    that it can be captured. sampled [R, 1 + k], slots [R], length [S]; all int32.
    """
    whole, part = divmod(mean - 1, 1.0)
    mixed = (length.index_select(0, slots).long() * 40503 + slots.long() * 9973) % 65536
    accepted = (whole + (mixed < part * 65536).long())[:, None]
    column = torch.arange(drafts.shape[1], device=drafts.device)
    drafts.copy_(torch.where(column < accepted, sampled[:, :-1], -1))


@op(cuda=launch_limit_drafts)
def limit_drafts(drafts: Mutated[Tensor], slots: Tensor, max_drafts: Tensor, drafted: Mutated[Tensor]) -> None:
    """Set drafts [R, k] beyond each request's own ``max_drafts [S]`` to -1, which never matches.

    Writes the number of remaining drafts of each row into drafted [R]. drafts (contiguous), drafted and slots [R]:
    int32.
    """
    column = torch.arange(drafts.shape[1], dtype=torch.int32)
    drafts.masked_fill_(column >= max_drafts[slots.long()][:, None], -1)
    drafted.copy_((drafts >= 0).sum(1))


@op(cuda=launch_round_inputs, meta=_round_inputs_meta)
def round_inputs(
    slots: Tensor, drafts: Tensor, length: Tensor, max_length: Tensor, status: Tensor,
    last_token: Tensor, page_table: Tensor, page_size: int, tables: Tensor | None = None,
) -> RoundInputs:  # fmt: skip
    """Compute the target's inputs in a round of W = 1 + drafts tokens per row.

    slots [R], drafts [R, W - 1] (-1: none); length, max_length, status, last_token [S]; page_table [S, MP]; tables [R]:
    row of the page table of each row (None: its slot's); all int32. Returns int32 (token_ids [R * W], positions [R *
    W], slot_mapping [R * W], kv_len [R]).

    Row r, column j is the token at position length - 1 + j: the last committed one, then the drafts. At and
    beyond ``max_length``, for which no page is reserved, a token keeps the last position and writes to padding page
    0; ``commit`` never accepts its result. An inactive row has position -1, kv_len 0 and token 0, which
    also stands in for a missing draft.
    """
    slot, width = slots.long(), drafts.shape[1] + 1
    fields = (field.index_select(0, slot).tolist() for field in (length, max_length, status, last_token))
    owners, guesses = (slots if tables is None else tables).tolist(), drafts.clamp_min(0).tolist()
    ids, positions, mapping, kv_len = list[int](), list[int](), list[int](), list[int]()
    written = list[tuple[int, int, int]]()  # (token of the pass, row of the page table, position)
    for row, (tokens, end, state, last) in enumerate(zip(*fields, strict=True)):
        active = state == RUNNING.value
        kv_len.append(min(tokens - 1 + width, end) if active else 0)
        for j in range(width):
            at = tokens - 1 + j
            positions.append(min(at, end - 1) if active else -1)
            if active and at < end:
                written.append((len(mapping), owners[row], at))
            mapping.append(j % page_size)
        ids += [last, *guesses[row]] if active else [0] * width
    if written:
        places, rows, ats = zip(*written, strict=True)
        pages = page_table[list(rows), [at // page_size for at in ats]].tolist()
        for place, page, at in zip(places, pages, ats, strict=True):
            mapping[place] = page * page_size + at % page_size
    made = (torch.tensor(values, dtype=torch.int32) for values in (ids, positions, mapping, kv_len))
    return tuple(made)  # type: ignore[return-value]


@op(cuda=launch_extend_inputs, meta=_extend_inputs_meta)
def extend_inputs(
    slots: Tensor, query_start: Tensor, start: Tensor, page_table: Tensor,
    page_size: int, num_tokens: SymbolicInt,
) -> ExtendInputs:  # fmt: skip
    """Compute the positions and the KV slot mapping of an extend pass.

    slots [R], query_start [R + 1] (row r owns tokens query_start[r] … query_start[r + 1]), start [R]
    (position of the row's first token in this pass), page_table [S, MP]; all int32. Returns int32
    (positions [num_tokens], slot_mapping [num_tokens], kv_len [R]). Tokens from query_start[R] on are padding:
    position -1, KV into padding page 0.
    """
    t = torch.arange(num_tokens, dtype=torch.int32)
    row = torch.searchsorted(query_start[1:].contiguous(), t, right=True)
    real = row < slots.shape[0]
    row = row.clamp_max(slots.shape[0] - 1)
    positions = (start[row] - query_start[row] + t).where(real, -1)
    at = positions.clamp_min(0)
    page = page_table[slots[row].long(), (at // page_size).long()]
    slot_mapping = (page * page_size + at % page_size).where(real, t % page_size)
    return positions, slot_mapping, start + query_start.diff()


@op(cuda=launch_commit, shape=lambda tokens: (tokens.shape[0], tokens.shape[1] + 2))
def commit(
    tokens: Tensor, drafts: Tensor, slots: Tensor, length: Mutated[Tensor], max_length: Tensor,
    status: Mutated[Tensor], last_token: Mutated[Tensor], stop_ids: Tensor, history: Mutated[Tensor],
) -> Tensor:  # fmt: skip
    """Accept the drafts that equal the target's sampled tokens and write the outcome into the slots.

    tokens [R, W] (sampled from the target), drafts [R, W - 1], slots [R]; length, max_length, status, last_token [S],
    stop_ids [S, 16] (-1: none), history [S, max_tokens]; all int32. Writes length, status, last_token, and the
    committed tokens into history at their positions.
    Returns result [R, W + 2] int32: count, status, then the committed tokens, -1 after ``count``.

    A row commits its longest matching prefix of drafts and one more sampled token, cut after the first
    stop id (STOP) and at ``max_length`` (LENGTH; STOP wins on the same token). An inactive row commits nothing
    and reports its status. No active slot may occur in two rows.
    """
    slot, width = slots.long(), tokens.shape[1]
    fields = (field.index_select(0, slot).tolist() for field in (length, max_length, status, stop_ids))
    result, changed, kept = list[list[int]](), list[tuple[int, int, int, int]](), list[tuple[int, int, int]]()
    lists = slots.tolist(), tokens.tolist(), drafts.tolist()
    for at, picked, drafted, before, end, state, stops in zip(*lists, *fields, strict=True):
        if state != RUNNING.value:
            result.append([0, state, *[-1] * width])
            continue
        room = max(end - before, 0)
        accepted = next((j for j in range(width - 1) if picked[j] != drafted[j]), width - 1)
        count = min(accepted + 1, room)
        stop = next((j for j in range(count) if picked[j] in stops), None)
        state = LENGTH.value if count == room else state
        if stop is not None:
            count, state = stop + 1, STOP.value
        result.append([count, state, *picked[:count], *[-1] * (width - count)])
        changed.append((at, before + count, state, picked[count - 1] if count else -1))
        kept += [(at, before + j, picked[j]) for j in range(count)]
    if changed:
        where, lengths, states, lasts = torch.tensor(changed).unbind(1)
        length.index_copy_(0, where, lengths.to(length.dtype))
        status.index_copy_(0, where, states.to(status.dtype))
        moved = lasts >= 0
        last_token.index_copy_(0, where[moved], lasts[moved].to(last_token.dtype))
    if kept:
        rows, columns, picks = torch.tensor(kept).unbind(1)
        history[rows, columns] = picks.to(history.dtype)
    return torch.tensor(result, dtype=tokens.dtype).view(len(result), width + 2)


AOT: list[AotCase] = [
    AotCase(
        _round_inputs_kernel,
        ints(
            "slots tables drafts length max_length status last_token page_table token_ids positions slot_mapping"
            " kv_len",
            "stride max_pages W",
        ),
        {"PAGE": 16, "BLOCK_W": 8},
        num_warps=1,
    ),
    AotCase(
        _extend_inputs_kernel,
        ints("slots query_start start page_table positions slot_mapping kv_len", "max_pages R T"),
        {"PAGE": 16, "BLOCK_T": TOKENS_PER_PROGRAM, "BLOCK_R": 16},
    ),
    AotCase(
        _commit_kernel,
        ints("tokens drafts slots length max_length status last_token stop_ids history result", "stride max_tokens W"),
        {"BLOCK_W": 8},
        num_warps=1,
    ),
    AotCase(_limit_drafts_kernel, ints("drafts slots max_drafts drafted", "stride K"), {"BLOCK_K": 4}, num_warps=1),
]
