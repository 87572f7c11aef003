"""Tokens that a draft model has not read yet, and their stored hidden states.

A draft model does not run while rounds draft nothing: the tokens that it would have read are *unobserved*. Owns the ops
``mark_observed`` (no token is unobserved), ``stash`` (keep the target's hidden state of the newest token) and
``take_unobserved`` (the tokens and hidden states to catch up with, in the form of a round's results). Drafters call
them inside graphs.

``observed [S]`` is the length up to which a draft model has read each slot's text; positions observed … length - 1 are
unobserved. Hidden states lie in a ring of W rows for each slot: that of the token at p at row p % W.

Shapes: R rows, S slots, W rows of a ring, d size of a hidden state, N tokens of history.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, ints, op

STASH_BLOCK = 1024


@triton.jit
def _mark_observed_kernel(observed, slots, length, stride):
    slot = tl.load(slots + tl.program_id(0))
    tl.store(observed + slot, tl.load(length + slot * stride))


@triton.jit
def _stash_kernel(ring, slots, result, length, source, words, stride, W, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if tl.load(result + row * words) > 0:
        slot = tl.load(slots + row)
        at = tl.load(length + slot * stride) - 1
        to = ring + (slot.to(tl.int64) * W + at % W) * size
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + i, tl.load(source + row.to(tl.int64) * size + i, mask=i < size), mask=i < size)


@triton.jit
def _take_unobserved_kernel(
    observed, slots, length, history, result, sampled, rows, stride, max_tokens, W, lag, BLOCK_W: tl.constexpr
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    first = tl.load(observed + slot)
    count = tl.minimum(tl.maximum(tl.load(length + slot * stride) - first, 0), W)
    j = tl.arange(0, BLOCK_W)
    real = j < count
    at = first + j
    token = tl.load(history + slot.to(tl.int64) * max_tokens + at - lag, mask=real & (at >= lag), other=0)
    token = tl.maximum(token, 0)
    tl.store(sampled + row * W + j, token, mask=j < W)
    tl.store(rows + row * W + j, slot * W + tl.where(real, at, j) % W, mask=j < W)
    out = result + row * (W + 2)
    tl.store(out + 2 + j, tl.where(real, token, -1), mask=j < W)
    tl.store(out, count)
    tl.store(out + 1, 0)
    tl.store(observed + slot, first + count)


def launch_mark_observed(observed: Tensor, slots: Tensor, length: Tensor) -> None:
    """Triton implementation of :func:`mark_observed`."""
    _mark_observed_kernel[(slots.shape[0],)](observed, slots, length, length.stride(0), num_warps=1)


def launch_stash(ring: Tensor, slots: Tensor, result: Tensor, length: Tensor, source: Tensor) -> None:
    """Triton implementation of :func:`stash`."""
    _, width, size = ring.shape
    _stash_kernel[(slots.shape[0], triton.cdiv(size, STASH_BLOCK))](
        ring, slots, result, length, source.contiguous(), result.stride(0), length.stride(0), width, size,
        BLOCK=STASH_BLOCK,
    )  # fmt: skip


def _take_unobserved_meta(slots: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = slots.shape[0]
    return slots.new_empty(rows, width + 2), slots.new_empty(rows, width), slots.new_empty(rows * width)


def launch_take_unobserved(
    observed: Tensor, slots: Tensor, length: Tensor, history: Tensor, width: int, lag: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Triton implementation of :func:`take_unobserved`."""
    result, sampled, rows = _take_unobserved_meta(slots, width)
    _take_unobserved_kernel[(slots.shape[0],)](
        observed, slots, length, history, result, sampled, rows, length.stride(0), history.stride(0), width, lag,
        BLOCK_W=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return result, sampled, rows


@op(cuda=launch_mark_observed)
def mark_observed(observed: Mutated[Tensor], slots: Tensor, length: Tensor) -> None:
    """Set ``observed[slots] = length[slots]``: observed [S], slots [R], length [S], all int32."""
    slot = slots.long()
    observed[slot] = length[slot]


@op(cuda=launch_stash)
def stash(ring: Mutated[Tensor], slots: Tensor, result: Tensor, length: Tensor, source: Tensor) -> None:
    """Store hidden states ``source [R, d]`` of rounds that committed one token each in ``ring [S, W, d]``, of one
    dtype.

    slots [R], result [R, 3] of ``rounds.commit``, length [S] including the token; all int32. A row that committed
    nothing stores nothing.
    """
    moved = result[:, 0] > 0
    slot = slots[moved].long()
    ring[slot, (length[slot].long() - 1) % ring.shape[1]] = source[moved]


@op(cuda=launch_take_unobserved, meta=_take_unobserved_meta)
def take_unobserved(
    observed: Mutated[Tensor], slots: Tensor, length: Tensor, history: Tensor, width: int, lag: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the first ``width`` unobserved tokens of each row, W = width; they count as observed from now on.

    observed [S], slots [R], length [S], history [S, N]; all int32. lag: the returned tokens are those ``lag`` positions
    earlier, for draft models that begin a round with the last tokens they know. An embedding's token, -1, reads as 0.
    Returns int32 (result [R, W + 2], sampled [R, W], rows [R · W]): result and sampled tokens like those of a round
    that committed these tokens, and the row of the ring, seen as [S · W, d], where each token's hidden state was
    stashed; after a row's tokens any valid row. Slots that occur twice must have no unobserved tokens.
    """
    slot = slots.long()
    first = observed[slot][:, None]
    count = (length[slot][:, None] - first).clamp(0, width)
    j = torch.arange(width, dtype=torch.int32)
    real = j < count
    at = (first + j).where(real, j)
    known = real & (at >= lag)
    token = history[slot[:, None], (at - lag).where(known, 0).long()].where(known, 0).clamp_min(0)
    observed[slot] = (first + count)[:, 0]
    result = torch.cat((count, torch.zeros_like(count), token.where(real, -1)), 1)
    return result, token.where(real, 0), (slots[:, None] * width + at % width).flatten()


AOT: list[AotCase] = [
    AotCase(_mark_observed_kernel, ints("observed slots length", "stride"), num_warps=1),
    AotCase(
        _stash_kernel,
        {**ints("slots result length", "words stride W size"), "ring": "*bf16", "source": "*bf16"},
        {"BLOCK": STASH_BLOCK},
    ),
    AotCase(
        _take_unobserved_kernel,
        ints("observed slots length history result sampled rows", "stride max_tokens W lag"),
        {"BLOCK_W": 32},
        num_warps=1,
    ),
]
