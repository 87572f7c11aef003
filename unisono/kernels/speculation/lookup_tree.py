"""Prompt lookup for draft trees: several different continuations of a request's last tokens.

Owns the op ``lookup_path``. A drafter that drafts a tree from text calls it once for each path, in order. Matches are
those of ``kernels/speculation/lookup.py`` in the request's own text, without a vote. Path 0 copies the tokens after the
longest match, the latest of equally long ones. Path l copies the tokens after the best match whose first ``size``
tokens differ from those of all paths before it. There is one launch per path, spread over blocks of the text as in
``lookup``.

Shapes: R rows, P paths, S slots, K drafts per path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unisono.kernels.library import AotCase, Mutated, op
from unisono.kernels.speculation.lookup import BEFORE, END, OUTSIDE

BLOCK, WARPS = 1024, 4


@triton.jit
def _token_after(own, last, at, i):
    """Read token ``i`` after position ``at``. A copy that reaches the end of the text repeats its own tokens."""
    return tl.load(own + at + 1 + i % tl.maximum(last - at, 1), mask=at < last, other=END)


@triton.jit(do_not_specialize=["path", "size"])
def _lookup_path_kernel(
    drafts, slots, history, length, scratch, stride, max_tokens, P, K, path, size, longest, shortest,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    own = history + slot.to(tl.int64) * max_tokens
    last = tl.load(length + slot * stride) - 1  # nothing follows the last token yet
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    matched = tl.zeros((BLOCK,), tl.int32)
    alive = at < last
    j = 0
    while (j < longest) & (tl.max(alive.to(tl.int32)) > 0):
        token = tl.load(own + last - j, mask=j <= last, other=BEFORE)
        earlier = tl.load(own + at - j, mask=alive & (at >= j), other=OUTSIDE)
        alive = alive & (earlier == token) & (token >= 0)
        matched += alive.to(tl.int32)
        j += 1

    new = matched >= shortest
    if tl.max(new.to(tl.int32)) > 0:
        for other in range(path):
            same = new
            for i in range(size):
                taken = tl.load(drafts + (row * P + other) * K + i)
                same = same & (_token_after(own, last, at, i) == taken)
            new = new & ~same
    best = tl.max(tl.where(new, (matched.to(tl.int64) << 32) | at.to(tl.int64), 0))
    cell = scratch + row * 2
    if best > 0:
        tl.atomic_max(cell + 1, best)
    tl.debug_barrier()  # this program's match is in before it counts as arrived
    if tl.atomic_add(cell, 1) == tl.num_programs(1) - 1:
        tl.store(cell, 0)
        chosen = tl.atomic_xchg(cell + 1, tl.zeros((), tl.int64))
        i = tl.arange(0, BLOCK_K)
        from_match = (i < size) & (chosen > 0)
        place = (chosen & 0x7FFFFFFF).to(tl.int32) + tl.zeros((BLOCK_K,), tl.int32)
        token = tl.where(from_match, _token_after(own, last, place, i), END)
        tl.store(drafts + (row * P + path) * K + i, token, mask=i < K)


def launch_lookup_path(
    drafts: Tensor, path: int, size: int, slots: Tensor, history: Tensor, length: Tensor, scratch: Tensor,
    longest: int, shortest: int,
) -> None:  # fmt: skip
    """Triton implementation of :func:`lookup_path`."""
    rows, paths, k = drafts.shape
    max_tokens = history.shape[1]
    _lookup_path_kernel[(rows, triton.cdiv(max_tokens, BLOCK))](
        drafts, slots, history, length, scratch, length.stride(0), max_tokens, paths, k, path, size, longest, shortest,
        BLOCK=BLOCK, BLOCK_K=triton.next_power_of_2(k), num_warps=WARPS,
    )  # fmt: skip


@op(cuda=launch_lookup_path)
def lookup_path(
    drafts: Mutated[Tensor], path: int, size: int, slots: Tensor, history: Tensor, length: Tensor,
    scratch: Mutated[Tensor], longest: int, shortest: int,
) -> None:  # fmt: skip
    """Write into drafts[:, path] the tokens after the best match that no earlier path, 0 … path - 1, has taken.

    drafts [R, P, K] int32, contiguous, with earlier paths filled in; size: tokens of this path, 1 … K; slots [R],
    history [S, max tokens], length [S] (a strided slot field): int32; scratch: from
    :func:`unisono.kernels.speculation.lookup.lookup_scratch` with one voter. ``longest`` and ``shortest`` bound a match
    as they do in :func:`unisono.kernels.speculation.lookup.lookup`. A path has taken a match when its first ``size``
    drafts are the tokens after it. After ``size`` drafts, and if no match is left, -1 is written.
    """
    drafts[:, path] = END.value
    for row, (slot, count) in enumerate(zip(slots.tolist(), length[slots.long()].tolist(), strict=True)):
        own = history[slot, :count]
        if count < 2:
            continue
        at = ((own[:-1] == own[-1]) & (own[:-1] >= 0)).nonzero()[:, 0]
        matched = torch.ones_like(at)
        for j in range(1, min(longest, count)):
            known = own[(at - j).clamp_min(0)] == own[-1 - j].where(own[-1 - j] >= 0, OUTSIDE.value)
            matched += (matched == j) & (at >= j) & known
        at, matched = at[matched >= shortest], matched[matched >= shortest]
        following = own[at[:, None] + 1 + torch.arange(size) % (count - 1 - at)[:, None]]
        taken = (following[:, None] == drafts[row, :path, :size]).all(-1).any(1)
        keys = ((matched << 32) | at).masked_fill(taken, 0)
        if len(keys) and keys.max() > 0:
            drafts[row, path, :size] = following[keys.argmax()]


AOT: list[AotCase] = [
    AotCase(
        _lookup_path_kernel,
        dict.fromkeys(("drafts", "slots", "history", "length"), "*i32")
        | dict.fromkeys(("stride", "max_tokens", "P", "K", "path", "size", "longest", "shortest"), "i32")
        | {"scratch": "*i64"},
        {"BLOCK": BLOCK, "BLOCK_K": 4},
        num_warps=WARPS,
    )
]
