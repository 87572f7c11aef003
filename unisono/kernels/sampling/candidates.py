"""Top-C tokens of each row of logits, in order, by the rule of ``sample``.

Owns the op ``candidates``. Drafters that try several continuations call it through `sampling/pipeline.py`. The first
candidate of a row is the token that ``sample`` returns; its second is the one that ``sample`` would return if the first
were forbidden; and so on, all with the same scores, filters and noise. There are three launches: the filter of
``sample``; *blocks* writes the best keys of each block; *merge* writes the best of the row.

Shapes: N rows of logits (one a slot), V vocabulary, S slots, B blocks, C candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, one_stride, op
from unisono.kernels.sampling.sampler import launch_filter, order_key, ranked_keys, scores_cpu, token_of
from unisono.types import FinishReason

RUNNING = tl.constexpr(int(FinishReason.RUNNING))
LEAST = tl.constexpr(-(2**63))
NONE = tl.constexpr(-1)
"""Value of absent candidates: the filters keep fewer tokens."""

BLOCK, BLOCK_WARPS = 4096, 8


@triton.jit
def store_best(ranked, out, C):
    """Store the C largest keys, largest first."""
    for i in range(C):
        best = tl.max(ranked)
        tl.store(out + i, best)
        ranked = tl.where(ranked == best, LEAST, ranked)


@triton.jit
def _blocks_kernel(
    logits, slots, length, status, temperature, seed_lo, seed_hi, ids, edits, edited, threshold, keys,
    stride, row_stride, offset, V, C, HAS_IDS: tl.constexpr, HAS_EDITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, block = tl.program_id(0), tl.program_id(1)
    field = tl.load(slots + n) * stride
    if tl.load(status + field) == RUNNING:
        column = block * BLOCK + tl.arange(0, BLOCK)
        ranked = ranked_keys(
            logits, field, length, temperature, seed_lo, seed_hi, ids, edits, edited, threshold,
            n, n, column, row_stride, offset, V, HAS_IDS, HAS_EDITS,
        )  # fmt: skip
        ranked = tl.where(column < V, ranked, LEAST)
        out = keys + (n * tl.num_programs(1) + block).to(tl.int64) * C
        store_best(ranked, out, C)


@triton.jit
def _merge_kernel(slots, status, keys, tokens, stride, B, C, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr):
    n = tl.program_id(0)
    running = tl.load(status + tl.load(slots + n) * stride) == RUNNING
    block, i = tl.arange(0, BLOCK_B)[:, None], tl.arange(0, BLOCK_C)[None, :]
    known = (block < B) & (i < C) & running
    ranked = tl.load(keys + (n.to(tl.int64) * B + block) * C + i, mask=known, other=LEAST)
    nothing = order_key(tl.full((), float("-inf"), tl.float32))
    for place in range(C):
        best = tl.max(tl.max(ranked, axis=1), axis=0)
        token = tl.where((place > 0) & ((best >> 32).to(tl.int32) <= nothing), NONE, token_of(best))
        tl.store(tokens + n * C + place, tl.where(running, token, 0))
        ranked = tl.where(ranked == best, LEAST, ranked)


def launch_candidates(
    logits: Tensor, slots: Tensor, count: int, length: Tensor, status: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, seed_lo: Tensor, seed_hi: Tensor, offset: int, ids: Tensor | None, edits: Tensor,
    edited: Tensor,
) -> Tensor:  # fmt: skip
    """Triton implementation of :func:`candidates`."""
    one_stride(length, status, temperature, top_k, top_p, min_p, seed_lo, seed_hi, edits)
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    threshold, *_ = launch_filter(logits, slots, 1, status, temperature, top_k, top_p, min_p, edits, edited)
    keys = logits.new_empty(rows, blocks, count, dtype=torch.int64)
    tokens = slots.new_empty(rows, count)
    _blocks_kernel[(rows, blocks)](
        logits, slots, length, status, temperature, seed_lo, seed_hi, ids, edits, edited, threshold, keys,
        status.stride(0), logits.stride(0), offset, vocab, count,
        HAS_IDS=ids is not None, HAS_EDITS=True, BLOCK=BLOCK, num_warps=BLOCK_WARPS,
    )  # fmt: skip
    _merge_kernel[(rows,)](
        slots, status, keys, tokens, status.stride(0), blocks, count,
        BLOCK_B=triton.next_power_of_2(blocks), BLOCK_C=triton.next_power_of_2(count),
    )  # fmt: skip
    return tokens


def _candidates_meta(logits: Tensor, slots: Tensor, count: int) -> Tensor:
    return slots.new_empty(logits.shape[0], count)


@op(cuda=launch_candidates, meta=_candidates_meta)
def candidates(
    logits: Tensor, slots: Tensor, count: int, length: Tensor, status: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, seed_lo: Tensor, seed_hi: Tensor, offset: int, ids: Tensor | None, edits: Tensor,
    edited: Tensor,
) -> Tensor:  # fmt: skip
    """Select the ``count`` best tokens of each row for position length + offset, best first: [N, count] int32.

    logits [N, V], slots [N], ids, edited and the slot fields are those of
    :func:`unisono.kernels.sampling.sampler.sample`, with a width of 1. Column 0 is the token of ``sample``. Later ones
    are -1 if the filters keep no more. Rows of inactive slots are 0.
    """
    scores, running = scores_cpu(
        logits, slots, 1, length, status, temperature, top_k, top_p, min_p, seed_lo, seed_hi, offset, ids, edits, edited
    )
    places = []
    for place in range(count):
        best = scores.argmax(-1, keepdim=True)
        token = best if ids is None else ids[best]
        places.append(token.masked_fill(scores.gather(1, best) == -torch.inf, NONE.value) if place else token)
        scores.scatter_(1, best, -torch.inf)
    return torch.cat(places, 1).where(running[:, None], 0).int()


def _signature(dtype: str) -> dict[str, str]:
    ints = dict.fromkeys(("slots", "length", "status", "seed_lo", "seed_hi", "ids", "edits"), "*i32")
    floats = dict.fromkeys(("temperature", "edited", "threshold"), "*fp32")
    scalars = dict.fromkeys(("stride", "row_stride", "offset", "V", "C"), "i32")
    return {"logits": f"*{dtype}", "keys": "*i64"} | ints | floats | scalars


AOT: list[AotCase] = [
    *(
        AotCase(
            _blocks_kernel,
            _signature(dtype),
            {"HAS_IDS": has_ids, "HAS_EDITS": True, "BLOCK": BLOCK},
            num_warps=BLOCK_WARPS,
        )
        for dtype, has_ids in (("bf16", False), ("bf16", True), ("fp16", False), ("fp32", True))
    ),
    *(
        AotCase(
            _merge_kernel,
            dict.fromkeys(("slots", "status", "tokens"), "*i32")
            | {"keys": "*i64"}
            | dict.fromkeys(("stride", "B", "C"), "i32"),
            {"BLOCK_B": 64, "BLOCK_C": places},
        )
        for places in (2, 8, 32)
    ),
]
