"""Sampling from column-parallel logits: each rank sorts its own columns, and the best keys of all ranks are the tokens.

Owns the ops ``column_keys`` and ``best_tokens``. Between them ``sampling/pipeline.py`` gathers the keys. A key is an
int64 of a score and a token (``sampler.ranked_keys``): the largest of all ranks' keys is the token that ``sample``
picks from whole rows, with the same scores, noise and ties. That holds for rows without filters only: a filter's
threshold follows from the whole row.

*keys* writes the best few of each block of columns; the blocks of a rank are not reduced, since a block's keys are few
bytes and another launch would take longer than gathering them. *tokens* picks the best of all ranks and blocks.

Shapes: N = R * W rows of logits, n columns of this rank, S slots, B blocks, C tokens of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, one_stride, op
from unisono.kernels.sampling.candidates import LEAST, NONE, RUNNING, store_best
from unisono.kernels.sampling.sampler import ARGMAX_BLOCKS, order_key, ranked_keys, scores_cpu, token_of


@triton.jit
def _keys_kernel(
    logits, slots, length, status, temperature, seed_lo, seed_hi, edits, edited, keys,
    stride, row_stride, width, offset, first, V, C, BLOCK: tl.constexpr,
):  # fmt: skip
    n, block = tl.program_id(0), tl.program_id(1)
    field = tl.load(slots + n // width) * stride
    column = block * BLOCK + tl.arange(0, BLOCK)
    ranked = tl.full((BLOCK,), LEAST, tl.int64)
    if tl.load(status + field) == RUNNING:
        ranked = ranked_keys(
            logits, field, length, temperature, seed_lo, seed_hi, None, edits, edited, None,
            n, n, column, row_stride, offset + n % width, V, False, True, first, False,
        )  # fmt: skip
        ranked = tl.where(column < V, ranked, LEAST)
    out = keys + (n * tl.num_programs(1) + block).to(tl.int64) * C
    store_best(ranked, out, C)


@triton.jit
def _tokens_kernel(keys, slots, status, tokens, stride, width, K, C, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    running = tl.load(status + tl.load(slots + n // width) * stride) == RUNNING
    at = tl.arange(0, BLOCK)
    ranked = tl.load(keys + n.to(tl.int64) * K + at, mask=(at < K) & running, other=LEAST)
    nothing = order_key(tl.full((), float("-inf"), tl.float32))
    for place in range(C):
        best = tl.max(ranked)
        token = tl.where((place > 0) & ((best >> 32).to(tl.int32) <= nothing), NONE, token_of(best))
        tl.store(tokens + n * C + place, tl.where(running, token, 0))
        ranked = tl.where(ranked == best, LEAST, ranked)


def _block(rows: int) -> tuple[int, int]:
    """Columns and warps of a program of *keys*."""
    return next(launch for most, launch in ARGMAX_BLOCKS.items() if rows <= most)


def key_bytes(columns: int) -> int:
    """Columns per block in a pass of many rows; each block has one key per candidate."""
    return 8 * triton.cdiv(columns, _block(max(ARGMAX_BLOCKS))[0])


def _keys_meta(logits: Tensor, count: int) -> Tensor:
    rows, columns = logits.shape
    return logits.new_empty(rows, triton.cdiv(columns, _block(rows)[0]) * count, dtype=torch.int64)


def launch_column_keys(
    logits: Tensor, slots: Tensor, width: int, count: int, length: Tensor, status: Tensor, temperature: Tensor,
    seed_lo: Tensor, seed_hi: Tensor, offset: int, first: int, edits: Tensor, edited: Tensor,
) -> Tensor:  # fmt: skip
    """Triton implementation of :func:`column_keys`."""
    one_stride(length, status, temperature, seed_lo, seed_hi, edits)
    (rows, columns), (block, warps) = logits.shape, _block(logits.shape[0])
    keys = _keys_meta(logits, count)
    _keys_kernel[(rows, triton.cdiv(columns, block))](
        logits, slots, length, status, temperature, seed_lo, seed_hi, edits, edited, keys,
        status.stride(0), logits.stride(0), width, offset, first, columns, count, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return keys


@op(cuda=launch_column_keys, meta=_keys_meta)
def column_keys(
    logits: Tensor, slots: Tensor, width: int, count: int, length: Tensor, status: Tensor, temperature: Tensor,
    seed_lo: Tensor, seed_hi: Tensor, offset: int, first: int, edits: Tensor, edited: Tensor,
) -> Tensor:  # fmt: skip
    """Compute the keys of the ``count`` best columns of each block of each row, by the rule of ``sample`` without
    filters.

    logits [R * width, n]: columns ``first`` … ``first + n`` of the vocabulary. edited [R * width, n] fp32: edited
    logits of slots with edits. slots, the slot fields and offset are those of
    :func:`unisono.kernels.sampling.sampler.sample`. Returns [R * width, B * count] int64: larger is better, in no order
    beyond a block, -2^63 if a block has no more columns or the slot does not run. B depends on n and on the number of
    rows.
    """
    rows, columns = logits.shape
    keys, off = _keys_meta(logits, count), torch.zeros_like(length)
    token = torch.arange(first, first + columns, dtype=torch.int32)
    scores, running = scores_cpu(
        logits, slots, width, length, status, temperature, off, 1 - off, off, seed_lo, seed_hi, offset, token, edits,
        edited,
    )  # fmt: skip
    bits = scores.where(scores != 0.0, 0.0).view(torch.int32)  # -0.0 ties with 0.0
    ranked = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32 | (0x7FFFFFFF - token).long()
    ranked = ranked.where(running[:, None], LEAST.value)
    blocks = keys.shape[1] // count
    padding = max(blocks * _block(rows)[0], (blocks - 1) * _block(rows)[0] + count) - columns
    padded = torch.nn.functional.pad(ranked, (0, padding), value=LEAST.value)
    for i, part in enumerate(padded.split(_block(rows)[0], dim=1)):
        keys[:, i * count : (i + 1) * count] = part.topk(min(count, part.shape[1]), dim=1).values
    return keys


def _tokens_meta(keys: Tensor, slots: Tensor, count: int) -> Tensor:
    return slots.new_empty(keys.shape[0], count)


def launch_best_tokens(keys: Tensor, slots: Tensor, width: int, count: int, status: Tensor) -> Tensor:
    """Triton implementation of :func:`best_tokens`."""
    rows, ranked = keys.shape
    tokens = _tokens_meta(keys, slots, count)
    _tokens_kernel[(rows,)](
        keys, slots, status, tokens, status.stride(0), width, ranked, count, BLOCK=triton.next_power_of_2(ranked)
    )
    return tokens


@op(cuda=launch_best_tokens, meta=_tokens_meta)
def best_tokens(keys: Tensor, slots: Tensor, width: int, count: int, status: Tensor) -> Tensor:
    """Select the ``count`` best tokens of each row, best first: [N, count] int32.

    keys [R * width, K] int64, contiguous: keys of all candidate columns, in any order. slots [R], status [S]: as in
    :func:`column_keys`. Column 0 is the token of ``sample``. Later ones are -1 if there are no more tokens. Rows of
    inactive slots are 0.
    """
    running = status[slots.long().repeat_interleave(width)] == RUNNING.value
    best = keys.topk(min(count, keys.shape[1]), dim=1).values
    best = torch.nn.functional.pad(best, (0, count - best.shape[1]), value=LEAST.value)
    nothing = int(torch.tensor(-torch.inf).view(torch.int32)) ^ 0x7FFFFFFF
    tokens = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    tokens[:, 1:].masked_fill_(best[:, 1:] >> 32 <= nothing, NONE.value)
    return tokens.where(running[:, None], 0).int()


def _signature(dtype: str) -> dict[str, str]:
    ints = dict.fromkeys(("slots", "length", "status", "seed_lo", "seed_hi", "edits"), "*i32")
    scalars = dict.fromkeys(("stride", "row_stride", "width", "offset", "first", "V", "C"), "i32")
    floats = {"temperature": "*fp32", "edited": "*fp32"}
    return {"logits": f"*{dtype}", "keys": "*i64"} | ints | floats | scalars


AOT: list[AotCase] = [
    *(
        AotCase(_keys_kernel, _signature(dtype), {"BLOCK": block}, num_warps=warps)
        for dtype in ("bf16", "fp16", "fp32")
        for block, warps in ARGMAX_BLOCKS.values()
    ),
    *(
        AotCase(
            _tokens_kernel,
            dict.fromkeys(("slots", "status", "tokens"), "*i32")
            | {"keys": "*i64"}
            | dict.fromkeys(("stride", "width", "K", "C"), "i32"),
            {"BLOCK": block},
        )
        for block in (2, 64, 1024)
    ),
]
